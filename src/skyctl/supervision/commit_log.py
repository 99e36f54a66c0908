"""Append-only files and the numbers of the events in them, committed together.

``position.json`` says how long each file is and which events are in them. It is replaced after the files
were written, and before any event is acknowledged. So whoever opens the log after its writer was killed cuts
the files to those lengths, asks for all later events, and has each exactly once.

Each write has a thread of its own: Ctrl-C, which may interrupt whoever waits for that thread, never leaves
one half done.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from skyctl.errors import RecordError, SkyctlError
from skyctl.files import make_private, write_atomic
from skyctl.remote.agent_messages import SequenceSet
from skyctl.run.journal import DISK_HINT

POSITION_FILE = "position.json"


class CommitLog:
    """The append-only files of one folder. Threads may share it.

    ``notes``: a few plain values that are saved with the position (changed by ``take`` alone).

    Args:
        on_saved: told, after each ``flush``, which numbers of which source were saved since the last.
    """

    def __init__(self, folder: Path, on_saved: Callable[[str, list[int]], None]) -> None:
        self.folder = folder
        self.notes: dict[str, Any] = {}
        self._on_saved = on_saved
        self._lock = threading.Lock()  # what is in memory; held for moments
        self._io = threading.Lock()  # the files; held while they are written
        self._sizes: dict[str, int] = {}
        self._numbers: dict[str, SequenceSet] = {}
        self._parts: dict[str, list[bytes]] = {}
        self._unsaved: dict[str, list[int]] = {}
        self._saved: dict[str, Any] = {}
        self._changed = False

    @classmethod
    def open(cls, folder: Path, on_saved: Callable[[str, list[int]], None]) -> CommitLog:
        """The log as its last writer committed it; longer files are cut back to that.

        Raises:
            RecordError: position.json is not one.
            SkyctlError: a file can't be cut.
        """
        made = cls(folder, on_saved)
        path = folder / POSITION_FILE
        try:
            saved = json.loads(path.read_text())
            made._sizes = {str(name): int(size) for name, size in saved["files"].items()}
            made._numbers = {n: SequenceSet(d["upto"], d["beyond"]) for n, d in saved["sources"].items()}
            made.notes = dict(saved["notes"])
            made._saved = saved
        except FileNotFoundError:
            return made
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise RecordError(
                f"{path} can't be read: {exc}",
                hint="without it nothing says which lines of the run's files are whole; launch a new run",
            ) from exc
        for name, size in made._sizes.items():
            made._sizes[name] = _cut(folder / name, size)
        return made

    def sizes(self) -> dict[str, int]:
        """By file, its committed length in bytes."""
        with self._lock:
            return dict(self._sizes)

    def upto(self, source: str) -> int:
        """The number up to which all events of that source are done with."""
        with self._lock:
            return self._numbers[source].upto if source in self._numbers else 0

    def settle(self, source: str, upto: int) -> None:
        """Counts all events of a source up to that number as done with, whether or not they were taken."""
        with self._lock:
            self._numbers.setdefault(source, SequenceSet()).settle(upto)

    def take(
        self,
        source: str,
        number: int | None,
        name: str | None,
        data: bytes,
        notes: Mapping[str, Any] | None = None,
    ) -> bool:
        """Adds ``data`` to the file ``name`` (relative; None: to none), once a number.

        Args:
            notes: what becomes of ``notes`` with that; all of it is saved, or nothing.

        Returns:
            False where that number was taken before: nothing has been added then.
        """
        with self._lock:
            if number is not None:
                fresh = self._numbers.setdefault(source, SequenceSet()).add(number)
                # Told again in any case: whoever sends it again has not heard that it was saved.
                self._unsaved.setdefault(source, []).append(number)
                self._changed = True
                if not fresh:
                    return False
            if name is not None:
                self._parts.setdefault(name, []).append(data)
                self._changed = True
            self.notes.update(notes or {})
            return True

    def replace(self, name: str, data: bytes) -> None:
        """Commits what was taken, then puts ``data`` in place of all that the file has, at once.

        Raises:
            SkyctlError: the disk is full, or the folder is gone.
        """
        self._uninterrupted(lambda: self._replace(name, data))

    def flush(self) -> None:
        """Writes all that was taken, commits it in ``position.json``, then tells ``on_saved``.

        Raises:
            SkyctlError: the disk is full, or the folder is gone. The data taken is kept for the next time.
        """
        self._uninterrupted(self._commit)

    def _uninterrupted(self, work: Callable[[], None]) -> None:
        """Does that in a thread, to its end, even where Ctrl-C interrupts who waits for it here."""

        def alone() -> None:
            with self._io:
                work()

        with ThreadPoolExecutor(1, "commit log") as writer:
            writer.submit(alone).result()

    # --- in a thread of its own

    def _replace(self, name: str, data: bytes) -> None:
        self._commit()
        write_atomic(self.folder / name, data)
        with self._lock:
            self._sizes[name] = len(data)
            self._changed = True
        self._commit()

    def _commit(self) -> None:
        with self._lock:
            if not self._changed:
                return
            parts, self._parts = self._parts, {}
            unsaved, self._unsaved = self._unsaved, {}
            sources = {n: {"upto": s.upto, "beyond": s.beyond} for n, s in self._numbers.items()}
            notes = dict(self.notes)
            self._changed = False
        try:
            self._write(parts)
            self._save({"files": dict(self._sizes), "sources": sources, "notes": notes})
        except (SkyctlError, OSError) as exc:
            self._put_back(parts, unsaved)
            if isinstance(exc, SkyctlError):
                raise
            raise SkyctlError(
                f"cannot write to {exc.filename or self.folder}: {exc.strerror or exc}", hint=DISK_HINT
            ) from exc
        for source, numbers in unsaved.items():
            self._on_saved(source, numbers)

    def _write(self, parts: Mapping[str, list[bytes]]) -> None:
        new = [name for name in parts if name not in self._sizes]
        if new:
            # A file that position.json knows nothing of would not be cut.
            self._sizes.update(dict.fromkeys(new, 0))
            self._save({"sources": {}, "notes": {}, **self._saved, "files": dict(self._sizes)})
        for name, pieces in list(parts.items()):
            self._sizes[name] = _append(self.folder / name, self._sizes[name], b"".join(pieces))
            del parts[name]  # type: ignore[attr-defined]

    def _save(self, document: dict[str, Any]) -> None:
        write_atomic(self.folder / POSITION_FILE, json.dumps(document))
        self._saved = document

    def _put_back(self, parts: Mapping[str, list[bytes]], unsaved: Mapping[str, list[int]]) -> None:
        with self._lock:
            for name, pieces in parts.items():
                self._parts[name] = [*pieces, *self._parts.get(name, [])]
            for source, numbers in unsaved.items():
                self._unsaved[source] = [*numbers, *self._unsaved.get(source, [])]
            self._changed = True


def _append(path: Path, size: int, data: bytes) -> int:
    """Adds to the file and gives its new size; where that fails, the file is as before. Raises OSError."""
    if not path.parent.is_dir():
        make_private(path.parent)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fdatasync(fd)
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        exc.filename = str(path)
        raise
    finally:
        os.close(fd)
    return size + len(data)


def _cut(path: Path, size: int) -> int:
    """Cuts what is beyond ``size``; gives the size it has then."""
    try:
        has = path.stat().st_size
        if has > size:
            os.truncate(path, size)
        return min(has, size)
    except FileNotFoundError:
        return 0
    except OSError as exc:
        raise SkyctlError(f"cannot write to {path}: {exc.strerror or exc}", hint=DISK_HINT) from exc
