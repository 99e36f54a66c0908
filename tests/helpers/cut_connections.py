"""Cuts the TCP connections between two processes of this machine, in whatever network namespaces they are."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
"""The system call's number; the same on every architecture (Linux 5.6 on)."""
_ESTABLISHED = "01"


def cut_connections(pid: int, peer: int) -> int:
    """Shuts down every connection between them, as a network that resets it would; how many there were."""
    mine, theirs = _connections(pid), _connections(peer)
    between = [fd for (here, there), fd in mine.items() if (there, here) in theirs]
    for fd in between:
        with suppress(OSError):  # it has just been closed
            _shut_down(pid, fd)
    return len(between)


def _connections(pid: int) -> dict[tuple[str, str], int]:
    """Descriptors of a process's connections, by both ends' addresses as the kernel writes them."""
    by_inode = {}
    for table in ("tcp", "tcp6"):
        for line in _lines(Path(f"/proc/{pid}/net/{table}"))[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                by_inode[f"socket:[{fields[9]}]"] = fields[1], fields[2]
    found = {}
    with suppress(FileNotFoundError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                ends = by_inode.get(os.readlink(entry))
                if ends is not None:
                    found[ends] = int(entry.name)
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _shut_down(pid: int, fd: int) -> None:
    process = os.pidfd_open(pid)
    try:
        own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if own < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=own) as taken:
        taken.shutdown(socket.SHUT_RDWR)
