"""The lock of a run: the one process that supervises it.

The supervising process holds a lock on a file in the run's folder for as long as it lives, so there is never
more than one. The file names it, for those who want to know.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
from pathlib import Path
from typing import Literal

from skyctl.agent.process_tree import process_start_ticks
from skyctl.errors import InputError, RecordError, SkyctlError
from skyctl.files import RunPaths, read_record
from skyctl.records.run_state import ENDED, RunState, Supervisor

SupervisorStatus = Literal["alive", "gone", "elsewhere"]

LOOK_S = 0.3
"""A process that only looks whether there is a supervisor holds the lock for less than that."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_process(*, attached: bool) -> Supervisor:
    """This process as a supervisor; ``attached``: somebody at a terminal sees what it says."""
    pid = os.getpid()
    return Supervisor(
        host=socket.gethostname() or "localhost",
        boot=_boot(),
        pid=pid,
        started=process_start_ticks(pid) or 0,
        attached=attached,
    )


def supervisor_status(paths: RunPaths) -> tuple[SupervisorStatus, Supervisor | None]:
    """Whether the run has a supervisor, and which.

    ``elsewhere``: on another machine that shares this folder; whether it lives can't be told from here.
    """
    named = _supervisor_in_lock(paths)
    try:
        fd = os.open(paths.lock, os.O_RDWR)
    except OSError:
        return "gone", None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return ("alive" if named is None or _is_this_host(named) else "elsewhere"), named
    finally:
        os.close(fd)
    if named is not None and not _is_this_host(named):
        return "elsewhere", named
    return "gone", named


class RunLock:
    """The right to supervise a run, from ``acquire_run_lock`` to ``release`` or the process's end."""

    def __init__(self, paths: RunPaths, fd: int, supervisor: Supervisor) -> None:
        self.paths = paths
        self.supervisor = supervisor
        self._fd: int | None = fd

    @property
    def run_ended(self) -> bool:
        """Whether the run has ended: whoever had the lock before may have ended it."""
        return read_record(RunState, self.paths.state).status in ENDED

    @classmethod
    def inherited(cls, paths: RunPaths, fd: int) -> RunLock:
        """The lock of a process that was started anew meanwhile, from what ``inherit`` gave."""
        os.set_inheritable(fd, False)
        return cls(paths, fd, this_process(attached=True))

    def inherit(self) -> int:
        """Has the lock stay with this process when it executes another program; its descriptor."""
        assert self._fd is not None, "it was released"
        os.set_inheritable(self._fd, True)
        return self._fd

    def release(self) -> None:
        """Releases the lock. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire_run_lock(paths: RunPaths, *, attached: bool, wait_s: float = 0.0) -> RunLock:
    """Makes this process the run's supervisor.

    Args:
        wait_s: how long to wait for the one there is to let it go.

    Raises:
        SkyctlError: there is one, or it is another machine's.
    """
    deadline = time.monotonic() + max(wait_s, LOOK_S)
    try:
        fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise SkyctlError(f"cannot write {paths.lock}: {exc.strerror or exc}") from exc
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise _lock_held_error(paths) from None
                time.sleep(0.05)
        named = _supervisor_in_lock(paths)
        if named is not None and not _is_this_host(named):
            raise SkyctlError(
                f"run {paths.run_id} is supervised on {named.host} (process {named.pid})",
                hint=f"go there; if that machine is gone for good, remove {paths.lock}",
            )
        us = this_process(attached=attached)
        os.ftruncate(fd, 0)
        os.pwrite(fd, us.model_dump_json().encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return RunLock(paths, fd, us)


def _lock_held_error(paths: RunPaths) -> SkyctlError:
    named = _supervisor_in_lock(paths)
    who = f" by process {named.pid} on {named.host}" if named is not None else ""
    return SkyctlError(f"run {paths.run_id} is supervised{who}", hint=f"see it: skyctl attach {paths.run_id}")


def end_supervisor(supervisor: Supervisor, wait_s: float) -> bool:
    """Ends a supervisor on this machine that does not answer: TERM, then KILL; False where it still runs."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            fd = os.pidfd_open(supervisor.pid)
        except OSError:
            return True
        try:
            # Looked at after the descriptor was opened: from here on it can't be another process.
            if process_start_ticks(supervisor.pid) != supervisor.started:
                return True
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signum)
        finally:
            os.close(fd)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if process_start_ticks(supervisor.pid) != supervisor.started:
                return True
            time.sleep(0.05)
    return False


def _supervisor_in_lock(paths: RunPaths) -> Supervisor | None:
    """The supervisor that the lock's file names; None where it is being written, empty or absent."""
    try:
        return Supervisor.model_validate_json(paths.lock.read_text())
    except (OSError, ValueError, InputError, RecordError):
        return None


def _is_this_host(supervisor: Supervisor) -> bool:
    return supervisor.host == (socket.gethostname() or "localhost")


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return "unknown"
