"""Code that a lab's processes share: system calls that Python 3.11 lacks, and how they answer the launcher.

Used by those that become a lab's nodes and its network. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
PR_SET_TIMERSLACK = 29

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 1
_SYS_MOUNT_SETATTR = 442  # the same on every architecture

_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_AFTER_IDLE = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
_BUFFERS = (
    ("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 33554432"),
    ("/proc/sys/net/ipv4/tcp_wmem", "4096 16384 33554432"),
)
"""TCP's buffers: least, at first, at most. 4 MB to send (Linux's own) do not fill 200 Mbit/s 50 ms away."""

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError naming the target."""
    result = _libc.mount(
        source.encode() if source is not None else None,
        target.encode(),
        kind.encode() if kind is not None else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _checked(result, f"mount {target}")


def bind_mount(fd: int, target: str, *, recursive: bool = False) -> None:
    """Mounts what the descriptor (O_PATH) refers to at ``target``, even where its path is hidden by now."""
    mount(f"/proc/self/fd/{fd}", target, None, MS_BIND | (MS_REC if recursive else 0))


def set_readonly(target: str, readonly: bool, *, recursive: bool = False) -> None:
    """mount_setattr(2), Linux ≥ 5.12. Raises OSError (ENOSYS on an older kernel)."""
    attr = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY) if readonly else _MountAttr(attr_clr=_MOUNT_ATTR_RDONLY)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(target.encode()),
        ctypes.c_uint(flags),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )
    _checked(result, f"mount_setattr {target}")


def set_timer_slack(nanoseconds: int) -> None:
    """How late this process's timers may be (the default, 50 µs, is much for a delay of 1 ms)."""
    _libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds), 0, 0, 0)


def configure_tcp() -> None:
    """In this network namespace, TCP goes by loss, as on most machines, and one stream can fill any link.

    It keeps its window when idle, and its buffers hold what is under way on a fast link that is far away.

    BBR takes a link's shortest round trip, which here is some microseconds, for its size: as soon as traffic
    goes both ways it sends four packets at a time and waits. Reno, the other kind that may always be chosen,
    takes seconds to get its window back after a pause, where Cubic does not. Both: docs/decisions.md. A
    setting that can't be changed stays as it is.
    """
    for name, value in ((_AFTER_IDLE, "0"), *_BUFFERS):
        with contextlib.suppress(OSError), open(name, "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(value)
    for name in ("cubic", "reno"):
        with contextlib.suppress(OSError), open(_CONGESTION, "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(name)
            file.flush()
            return


def disable_ipv6() -> None:
    """In this network namespace, where it can be."""
    for name in ("all", "default"):
        with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6", "w") as file:  # noqa: PTH123
            file.write("1")


def say(message: dict[str, Any]) -> None:
    """One JSON line to whoever has started this process."""
    os.write(1, json.dumps(message).encode() + b"\n")


def leave_launcher() -> None:
    """No more is read from or said to whoever has started this process."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
