"""Who supervises a run, and what others ask of it.

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

from skyctl.errors import InputError, RecordError, SkyctlError
from skyctl.files import RunPaths
from skyctl.records.run import Supervisor

Standing = Literal["alive", "gone", "elsewhere"]

LOOK_S = 0.3
"""Whoever only looks whether there is a supervisor holds the lock for less than that."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_process(*, attached: bool) -> Supervisor:
    """Us. ``attached``: somebody sees what it says."""
    pid = os.getpid()
    return Supervisor(
        host=socket.gethostname() or "localhost",
        boot=_boot(),
        pid=pid,
        started=started(pid) or 0,
        attached=attached,
    )


def started(pid: int) -> int | None:
    """When that process started, in clock ticks since the boot; None where there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else None


def standing(paths: RunPaths) -> tuple[Standing, Supervisor | None]:
    """Whether the run has a supervisor, and which.

    ``elsewhere``: on another machine that shares this folder; whether it lives can't be told from here.
    """
    named = _named(paths)
    try:
        fd = os.open(paths.lock, os.O_RDWR)
    except OSError:
        return "gone", None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return ("alive" if named is None or _here(named) else "elsewhere"), named
    finally:
        os.close(fd)
    if named is not None and not _here(named):
        return "elsewhere", named
    return "gone", named


class Claim:
    """The right to supervise a run. Made by ``claim``; ends with ``release`` or with the process."""

    def __init__(self, paths: RunPaths, fd: int, supervisor: Supervisor) -> None:
        self.paths = paths
        self.supervisor = supervisor
        self._fd: int | None = fd

    def release(self) -> None:
        """Gives it up. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim(paths: RunPaths, *, attached: bool, wait_s: float = 0.0) -> Claim:
    """Becomes the run's supervisor.

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
                    raise _taken(paths) from None
                time.sleep(0.05)
        named = _named(paths)
        if named is not None and not _here(named):
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
    return Claim(paths, fd, us)


def _taken(paths: RunPaths) -> SkyctlError:
    named = _named(paths)
    who = f" by process {named.pid} on {named.host}" if named is not None else ""
    return SkyctlError(f"run {paths.run_id} is supervised{who}", hint=f"see it: skyctl attach {paths.run_id}")


def end(supervisor: Supervisor, wait_s: float) -> bool:
    """Ends a supervisor of this machine that does not answer: TERM, then KILL. False where it still runs."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            fd = os.pidfd_open(supervisor.pid)
        except OSError:
            return True
        try:
            # Looked at after the descriptor was opened: from here on it can't be another process.
            if started(supervisor.pid) != supervisor.started:
                return True
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signum)
        finally:
            os.close(fd)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if started(supervisor.pid) != supervisor.started:
                return True
            time.sleep(0.05)
    return False


def _named(paths: RunPaths) -> Supervisor | None:
    """Whom the lock's file names; nobody where it is being written, was let go, or is not there."""
    try:
        return Supervisor.model_validate_json(paths.lock.read_text())
    except (OSError, ValueError, InputError, RecordError):
        return None


def _here(supervisor: Supervisor) -> bool:
    return supervisor.host == (socket.gethostname() or "localhost")


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return "unknown"
