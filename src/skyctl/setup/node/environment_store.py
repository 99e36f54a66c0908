"""The environments on a node: where they lie, who counts on them, and how one goes. No torch.

::

    $XDG_DATA_HOME/skyctl/env, else ~/.local/share/skyctl/env    0700
    ├── lock                              held by whoever makes or removes one
    └── py3.11-torch2.13.0-1a2b3c4d5e/    a virtual environment, never altered once it is whole
        └── skyctl.json                   written last: what is in it, and its owners
    …/skyctl/python                       what ``python_bringer`` brought; goes with the last environment

A folder without a readable ``skyctl.json`` is half made: whoever holds the lock may remove it. An owner is
one node of one cluster of one launcher; the last to go takes the environment along. The files there are run,
so nobody else may be able to put anything there (``private_folder``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from skyctl.agent.node_cache import ENVIRONMENT_MARKER
from skyctl.agent.process_tree import find_descendants, process_table
from skyctl.errors import UnfitError
from skyctl.private_folder import UnsafeFolderError, make_private_folder

LOCK_FILE = "lock"
PYTHON_FOLDER = "python"
DELETED_PREFIX = ".old-"
LOCK_RETRY_S = 0.2
PROC = Path("/proc")

ReportProgress = Callable[[str, float], None]
"""Called with what is going on, and the share that is done."""


def environments_root() -> Path:
    """The folder of this user's environments (not made here)."""
    base = os.environ.get("XDG_DATA_HOME", "")
    folder = Path(base) if base.startswith("/") else Path("~/.local/share").expanduser()
    return folder / "skyctl" / "env"


def require_private(path: Path) -> Path:
    """Makes the folder of environments, or of one, where it is missing, or judges the one that is there.

    Raises:
        UnfitError: it can't be made, or is no folder, or somebody else could put things there that would run
            as this user; names the folder.
    """
    try:
        return make_private_folder(path)
    except OSError as exc:
        raise unusable_folder(path, exc) from exc


def unusable_folder(path: Path, exc: OSError) -> UnfitError:
    """The error for a place where no environment can be kept."""
    mend = "make it a folder that has room and can be written to"
    if isinstance(exc, UnsafeFolderError):
        mend = exc.hint
    return UnfitError(
        f"no environment can be kept in {path}: {exc.filename}: {exc.strerror}",
        node="",
        hint=f"{mend}; or name another place: `env: {{XDG_DATA_HOME: /path}}` in cluster.yaml",
    )


@contextlib.contextmanager
def lock_environments(say: ReportProgress) -> Iterator[Path]:
    """Waits until nobody else makes or removes an environment here; gives their folder, which is there then.

    Taken for the whole of a change, so that what is half made while one holds it is nobody's any more. If
    nothing is left at the end, the folder goes too.

    Raises:
        UnfitError: that folder can't be had, or somebody else could put things into it.
    """
    folder = environments_root()
    fd = _acquire_lock(folder, say)
    try:
        yield folder
    finally:
        _remove_empty_root(folder)
        os.close(fd)


def _acquire_lock(folder: Path, say: ReportProgress) -> int:
    while True:
        require_private(folder)
        try:
            fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # another one has just removed the empty folder
        except OSError as exc:
            raise unusable_folder(folder, exc) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one before may have removed the file: then a new one is the lock.
            if os.fstat(fd).st_ino == (folder / LOCK_FILE).stat().st_ino:
                return fd
        except BlockingIOError:
            say("waiting for another setup there", 0.0)
            time.sleep(LOCK_RETRY_S)
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _remove_empty_root(folder: Path) -> None:
    """Removes the folder, and skyctl's own above it, where they hold nothing. The lock is held."""
    with contextlib.suppress(OSError):
        if [entry.name for entry in folder.iterdir()] == [LOCK_FILE]:
            (folder / LOCK_FILE).unlink()
            folder.rmdir()
            folder.parent.rmdir()


def remove_unused_pythons() -> int:
    """Removes the Pythons that setup brought, where no environment is left and nothing runs in them but us.

    Gives the bytes freed.
    """
    folder = environments_root().parent / PYTHON_FOLDER
    if environments_root().exists() or not folder.is_dir() or processes_using(folder):
        return 0
    freed_bytes = size_bytes(folder)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
    return freed_bytes


def read_marker(path: Path) -> dict[str, Any] | None:
    """The marker that says what is in an environment; None if it is half made, damaged, or not there."""
    try:
        found = json.loads((path / ENVIRONMENT_MARKER).read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and isinstance(found.get("owners"), list)
    return found if whole and isinstance(found.get("requirements"), list) else None


def write_marker(path: Path, marker: dict[str, Any]) -> None:
    """Writes an environment's marker, which says what is in it and who counts on it: whole or not at all."""
    fresh = path / f".{ENVIRONMENT_MARKER}.new"
    with fresh.open("w") as file:
        json.dump(marker, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path / ENVIRONMENT_MARKER)


def add_owner(path: Path, owner: str) -> None:
    """Notes in an environment's marker that ``owner`` counts on it. The caller holds the store's lock."""
    marker = read_marker(path)
    if marker is not None and owner not in marker["owners"]:
        write_marker(path, {**marker, "owners": [*marker["owners"], owner]})


def remove_unfinished(folder: Path) -> int:
    """Removes what is half made or half removed. The lock is held. Gives the bytes freed."""
    freed_bytes = 0
    for path in folder.iterdir():
        mine = path.name.startswith((DELETED_PREFIX, "py")) and path.is_dir() and not path.is_symlink()
        if mine and read_marker(path) is None:
            freed_bytes += size_bytes(path)
            shutil.rmtree(path, ignore_errors=True)
    return freed_bytes


def delete_environment(path: Path) -> int:
    """Removes an environment: out of its place at once, then file by file. Gives the bytes freed.

    Of one that the user has moved elsewhere, and linked to, only the link.
    """
    if path.is_symlink():
        path.unlink()
        return 0
    size = size_bytes(path)
    aside = path.with_name(f"{DELETED_PREFIX}{secrets.token_hex(4)}")
    path.rename(aside)
    with contextlib.suppress(OSError):
        (aside / ENVIRONMENT_MARKER).unlink()  # what is left if this is cut short, the next one sweeps up
    shutil.rmtree(aside)
    return size


def environments_owned_by(folder: Path, owners: Sequence[str]) -> list[Path]:
    """The whole environments that one of these owners counts on."""
    found = []
    for path in sorted(folder.iterdir()):
        marker = read_marker(path) if path.is_dir() else None
        if marker is not None and set(owners) & set(marker["owners"]):
            found.append(path)
    return found


def size_bytes(path: Path) -> int:
    """Bytes that a folder's files take on the disk."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).lstat().st_blocks * 512
    return total


def free_bytes(path: Path) -> int | None:
    """How much may be written there, or where it would come to be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_bavail


def processes_using(path: Path) -> list[int]:
    """Processes that run in an environment: started as its Python, or with its libraries in memory.

    (``/proc/PID/exe`` does not tell: it is the Python that the environment was made of.) Of others' processes
    nothing is known; without ``/proc``, of none. The agent that runs this, and what it has started, may be
    of the environment too, and do not count.
    """
    agent = os.getppid()
    ours = {agent, *find_descendants(process_table(), agent)}
    marks = {os.fsencode(f"{path}/"), os.fsencode(f"{path.resolve()}/")}
    found = []
    names = os.listdir(PROC) if PROC.is_dir() else []  # noqa: PTH208
    for pid in sorted(int(name) for name in names if name.isdigit()):
        if pid in ours:
            continue
        with contextlib.suppress(OSError):
            started_as = (PROC / str(pid) / "cmdline").read_bytes()
            if any(started_as.startswith(mark) for mark in marks):
                found.append(pid)
                continue
            loaded = (PROC / str(pid) / "maps").read_bytes()
            if any(mark in loaded for mark in marks):
                found.append(pid)
    return found
