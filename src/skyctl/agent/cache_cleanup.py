"""The part of ``skyctl clean`` on a node: it removes from the cache what no process uses.

It runs without an agent and writes nothing, so also where the disk is full. Code, workloads and files are in
use while a process has them locked (``NodeCache``). A session is over when its agent's lock is free and no
process carries its tag. Checkpoints stay: a run may go on from them. This source is sent by the bootstrap.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyctl.agent.node_cache import MANIFEST
from skyctl.private_folder import check_private_folder

LEFTOVER_AGE_S = 3600.0
"""An entry half written or half removed so long ago is nobody's any more, unless it is locked.

A date ahead of this clock is as old: the clock, or a shared disk's, was set since."""


Kind = dict[str, Any]
"""``what`` it is, how many were ``removed`` and ``kept``, and their ``freed_bytes`` and ``kept_bytes``."""


def clean_cache(root: Path, *, dry_run: bool) -> list[Kind]:
    """Removes what no process uses, and the cache's folders where nothing is left in them.

    Args:
        dry_run: say what would be removed, and change nothing.

    Returns:
        Each kind of which there was something; bytes are those on the disk.

    Raises:
        UnsafeFolderError: somebody else could put things there; then nothing is touched.
    """
    try:
        check_private_folder(root)
    except FileNotFoundError:
        return []
    kinds = [_clean_kind(root, name, dry_run) for name in ("packages", "trees", "blobs", "runs")]
    sessions = _clean_sessions(root / "sessions", dry_run)
    kinds += [sessions, _clean_trials(root, dry_run), _clean_turns(root / "turns", dry_run)]
    if not dry_run and not sessions["kept"]:
        _remove_empty(root)
    return [kind for kind in kinds if kind["removed"] or kind["kept"]]


def _make_kind(what: str) -> Kind:
    return {"what": what, "removed": 0, "freed_bytes": 0, "kept": 0, "kept_bytes": 0}


def _count(kind: Kind, size_bytes: int, *, kept: bool) -> None:
    number, total = ("kept", "kept_bytes") if kept else ("removed", "freed_bytes")
    kind[number] += 1
    kind[total] += size_bytes


def _clean_kind(root: Path, name: str, dry_run: bool) -> Kind:
    kind = _make_kind(name)
    for path in _entries(root / name):
        with contextlib.suppress(OSError):  # another one removes it just now
            size = _size_bytes(path)
            is_half = path.name.startswith(".")
            if is_half and abs(time.time() - path.lstat().st_mtime) < LEFTOVER_AGE_S:
                continue
            with _locked_alone(path / MANIFEST if path.is_dir() else path) as is_free:
                is_used = not is_free or (name == "runs" and not is_half)
                if not is_used:
                    _remove(path, dry_run)
                _count(kind, size, kept=is_used)
    return kind


def _clean_sessions(folder: Path, dry_run: bool) -> Kind:
    kind = _make_kind("sessions")
    with contextlib.suppress(FileNotFoundError), (folder / ".lock").open("r+") as making:
        fcntl.flock(making, fcntl.LOCK_EX)  # nobody makes one meanwhile
        for path in _entries(folder):
            if path.name.startswith("s-"):
                size = _size_bytes(path)
                with _locked_alone(path / "lock") as is_free:
                    is_used = not is_free or not _is_of_this_host(path) or _has_processes(path.name)
                    if not is_used:
                        _remove(path, dry_run)
                    _count(kind, size, kept=is_used)
    return kind


def _clean_trials(root: Path, dry_run: bool) -> Kind:
    """Removes the findings about the processor (``device.dtype_support``), unless they are locked."""
    kind = _make_kind("trials")
    paths = list(root.glob("dtype-support.*"))
    if paths:
        with _locked_alone(root / "dtype-support.lock") as is_free:
            _count(kind, sum(map(_size_bytes, paths)), kept=not is_free)
            for path in paths if is_free and not dry_run else []:
                path.unlink(missing_ok=True)
    return kind


def _clean_turns(folder: Path, dry_run: bool) -> Kind:
    """Folders of shared devices (``turns.device_folder``) whose arbiter has ended."""
    kind = _make_kind("turns")
    for path in _entries(folder):
        size = _size_bytes(path)
        with _locked_alone(path / "lock") as is_free, _locked_alone(path / "log") as has_ended:
            _count(kind, size, kept=not (is_free and has_ended))
            if is_free and has_ended:
                _remove(path, dry_run)
    return kind


def _remove_empty(root: Path) -> None:
    with contextlib.suppress(OSError):
        (root / "sessions" / ".lock").unlink()
    for folder in (*_entries(root), root):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


@contextlib.contextmanager
def _locked_alone(path: Path) -> Iterator[bool]:
    """Locks a file for the time; False where another process has it locked. One that is missing is free."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _remove(path: Path, dry_run: bool) -> None:
    """Moves it aside at once, so that nobody finds half of it, then deletes it."""
    if dry_run:
        return
    aside = path.with_name(f".old-{secrets.token_hex(4)}")
    path.rename(aside)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()


def _size_bytes(path: Path) -> int:
    """The bytes that a file, or a folder with all that is in it, takes on the disk."""
    total = path.lstat().st_blocks * 512
    for place, folders, names in os.walk(path):
        for name in (*folders, *names):
            with contextlib.suppress(OSError):
                total += (Path(place) / name).lstat().st_blocks * 512
    return total


def _is_of_this_host(session: Path) -> bool:
    """Whether its agent ran here: a home may be shared. Yes where that was not written down any more."""
    try:
        return bool(json.loads((session / "owner.json").read_text())["host"] == socket.gethostname())
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _has_processes(session_id: str) -> bool:
    """Whether a process carries the session's tag (``process_tree.SESSION_TAG``)."""
    mark = f"\0SKYCTL_SESSION={session_id}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in b"\0" + (folder / "environ").read_bytes() + b"\0":
                return True
    return False
