"""A session's private folder, its guardian process, and the cleaning up after agents that have died.

A folder holds ``owner.json`` (host, boot, pid and its start time) and ``lock``, which the agent holds locked
for as long as it lives. Only a folder of this host whose agent is gone and whose lock is free is swept. The
guardian is a forked child that does the same for its own agent the moment that dies, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyctl.agent import process_tree

SWEEP_TIMEOUT_S = 3.0


class SessionFolder:
    """Made with ``create``; ``remove`` ends it. The folder's name is the session's id and the tag's value."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.id = path.name
        self._lock_fd = lock_fd
        self._guardian_fd: int | None = None
        self.guardian: int | None = None

    @classmethod
    def create(cls, sessions: Path) -> SessionFolder:
        """Sweeps what dead agents left in ``sessions``, then makes a new folder there (0700)."""
        with _lock_sessions(sessions):
            for path in sessions.iterdir():
                if path.is_dir():
                    _sweep_if_dead(path)
            path = Path(tempfile.mkdtemp(prefix="s-", dir=sessions))
            with contextlib.ExitStack() as undo:  # on a full disk it has no owner's name to be swept by
                undo.callback(shutil.rmtree, path, ignore_errors=True)
                lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, lock_fd)
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (path / "owner.json").write_text(json.dumps(_describe_owner()))
                undo.pop_all()
        return cls(path, lock_fd)

    def start_guardian(self) -> None:
        """Forks the guardian. To be called before there is any thread, with no frame half-written."""
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(write_fd)
                _run_guardian(read_fd, self.path)
            finally:
                os._exit(0)
        os.close(read_fd)
        self._guardian_fd, self.guardian = write_fd, pid

    def remove(self) -> None:
        """Removes the folder and ends the guardian."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._guardian_fd is not None:
            os.close(self._guardian_fd)
            self._guardian_fd = None
            _reap_child(self.guardian)
        os.close(self._lock_fd)


def _reap_child(pid: int | None) -> None:
    """Waits up to 2 s for that child to end."""
    deadline = time.monotonic() + 2
    try:
        while pid and os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
    except ChildProcessError:
        return


def sweep_session(path: Path) -> None:
    """Ends every process tagged with that folder's name, then removes the folder."""
    deadline = time.monotonic() + SWEEP_TIMEOUT_S
    while time.monotonic() < deadline:
        rows = process_tree.process_table()
        left = process_tree.filter_running(
            rows, process_tree.find_tagged(rows, process_tree.SESSION_TAG, path.name)
        ) - {os.getpid()}
        if not left:
            break
        process_tree.send_signal(left, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(path, ignore_errors=True)


def _run_guardian(read_fd: int, path: Path) -> None:
    """Waits until the agent's end of the pipe is closed, for whatever reason, and cleans up."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, read_fd)
    os.closerange(read_fd + 1, 256)
    os.chdir("/")
    while os.read(read_fd, 1):
        pass
    sweep_session(path)


def _describe_owner() -> dict[str, Any]:
    row = process_tree.process_entry(os.getpid())
    start = row.start if row else 0
    return {
        "host": socket.gethostname(),
        "boot": process_tree.read_boot_id(),
        "pid": os.getpid(),
        "start": start,
    }


@contextlib.contextmanager
def _lock_sessions(sessions: Path) -> Iterator[None]:
    """Keeps others from cleaning up a folder between its making and its locking."""
    with (sessions / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep_if_dead(path: Path) -> None:
    try:
        owner = json.loads((path / "owner.json").read_text())
        if owner["host"] != socket.gethostname():
            return  # a home shared by several hosts: it is another's
        row = process_tree.process_entry(owner["pid"])
        if (
            owner["boot"] == process_tree.read_boot_id()
            and row
            and row.start == owner["start"]
            and row.state not in "ZX"
        ):
            return
        with (path / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sweep_session(path)
    except FileNotFoundError:
        # Cut off between its making and its owner's file. One dated ahead was made before the clock was set.
        if abs(time.time() - path.stat().st_mtime) > 3600:
            shutil.rmtree(path, ignore_errors=True)
    except (OSError, ValueError, KeyError, TypeError):
        return  # locked (its agent lives), or not ours to judge
