"""What a forked process must do that a newly started Python has done for it. Linux only.

The kernel goes on showing the environment and the arguments that the first process was started with, and the
tags by which ours are found (``process.tagged``) stand there. So that process is started with room for them
(``placeholders``), and a fork writes its own into that room.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TextIO

from skyctl.agent.process import SESSION_TAG, TASK_TAG

ROOM = 64
FD_DIR = "/proc/self/fd"
_FILLER = "-"


def placeholders() -> dict[str, str]:
    """The environment that makes room for the tags."""
    return dict.fromkeys((SESSION_TAG, TASK_TAG), _FILLER * ROOM)


def write_tags(tags: Mapping[str, str]) -> None:
    """Writes those tags into what ``/proc/PID/environ`` shows of this process.

    Raises:
        OSError: there is no room for them, or the kernel does not show what was written.
    """
    block = b"\0" + Path("/proc/self/environ").read_bytes()
    start = _stat_field(50)
    if not start:
        raise OSError("the kernel does not say where this process's environment lies")
    for key, value in tags.items():
        entry = f"{key}={value}".encode()
        at = block.find(b"\0" + f"{key}={_FILLER}".encode())
        end = block.find(b"\0", at + 1)
        if at < 0 or len(entry) > end - at - 1:
            raise OSError(f"no room in this process's environment for {key}={value}")
        ctypes.memmove(start + at, entry.ljust(end - at - 1, b"\0"), end - at - 1)
    shown = b"\0" + Path("/proc/self/environ").read_bytes() + b"\0"
    for key, value in tags.items():
        if b"\0" + f"{key}={value}".encode() + b"\0" not in shown:
            raise OSError(f"this process's environment does not show {key}={value}")


def write_arguments(text: str) -> None:
    """What ``ps`` shows of this process, as far as there is room."""
    start = _stat_field(48)
    room = _stat_field(49) - start
    if start and room > 1:
        ctypes.memmove(start, text.encode()[: room - 1].ljust(room, b"\0"), room)


def _stat_field(number: int) -> int:
    """A field of /proc/self/stat, counted as in proc(5)."""
    text = Path("/proc/self/stat").read_bytes()
    return int(text[text.rfind(b")") + 2 :].split()[number - 3])


def threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def open_files() -> set[int]:
    """This process's descriptors."""
    found = {int(name) for name in os.listdir(FD_DIR)}  # noqa: PTH208
    return {fd for fd in found if _is_open(fd)}  # not the one that the listing took


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def close_others(keep: set[int]) -> None:
    """Closes every descriptor but the standard ones and those."""
    for fd in open_files() - keep - {0, 1, 2}:
        os.close(fd)


def default_signals() -> None:
    """Signals as a new Python has them."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def fresh_streams() -> None:
    """``sys.stdin``, ``stdout`` and ``stderr`` on descriptors 0 to 2, unbuffered as with ``python -u``."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False))
    sys.stdout, sys.stderr = _writer(1, "strict"), _writer(2, "backslashreplace")


def _writer(fd: int, errors: str) -> TextIO:
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), errors=errors, write_through=True)


def run_and_exit(action: Callable[[], int | None]) -> NoReturn:
    """Runs that and ends the process as a Python of its own would end: the frames above are another's."""
    status = 1
    try:
        status = _status(action)
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does: waits for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


def _status(action: Callable[[], int | None]) -> int:
    try:
        return int(action() or 0)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return (exc.code or 0) & 0xFF
        print(exc.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - nobody above is left to see it
        traceback.print_exc()
    return 1
