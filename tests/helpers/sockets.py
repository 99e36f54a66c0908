"""Sockets of other processes of this machine, in whatever network namespaces, as Linux shows them."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

ESTABLISHED, LISTENING = "01", "0A"
_PIDFD_GETFD = 438
"""The system call's number; the same on every architecture (Linux 5.6 on)."""
_INODES = {
    "tcp": 9,
    "tcp6": 9,
    "udp": 9,
    "udp6": 9,
    "raw": 9,
    "raw6": 9,
    "unix": 6,
    "netlink": 9,
    "packet": 8,
}
"""By table of /proc/PID/net, the column that has a socket's number."""
_GET_FILTER, _MOST_INSTRUCTIONS = 26, 4096
_ONLY_IF_EQUAL = 0x15
_LIBRARY = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Socket:
    """A socket that a process holds, under however many descriptors.

    Attributes:
        table: of /proc/PID/net that it stands in; empty: in none of those known here.
        state, here, there: of TCP, as the kernel writes them; else empty.
        descriptor: one of those it has in the process.
    """

    pid: int
    table: str
    state: str
    here: str
    there: str
    descriptor: int


def sockets_of(pid: int) -> list[Socket]:
    """All that the process holds now; none if it has ended."""
    rows = {}
    for table, column in _INODES.items():
        for line in _lines(Path(f"/proc/{pid}/net/{table}"))[1:]:
            fields = line.split()
            is_tcp = table.startswith("tcp")
            rows[fields[column]] = (table, *((fields[3], fields[1], fields[2]) if is_tcp else ("", "", "")))
    found = {}
    with suppress(FileNotFoundError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                name = os.readlink(entry)
                if name.startswith("socket:["):
                    row = rows.get(name.removeprefix("socket:[")[:-1], ("", "", "", ""))
                    found[name] = Socket(pid, *row, descriptor=int(entry.name))
    return list(found.values())


def taken(pid: int, descriptor: int) -> socket.socket:
    """A copy of another process's socket. Raises OSError: it is gone, or not ours to take."""
    process = os.pidfd_open(pid)
    try:
        own = _LIBRARY.syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if own < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return socket.socket(fileno=own)


def maker(one: Socket) -> int:
    """The process that has made the pair of which a connected Unix socket is an end."""
    with taken(one.pid, one.descriptor) as end:
        pid: int = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


def admitted(one: Socket) -> set[str] | None:
    """The IPv4 addresses that a socket's filter lets through; None: it has no filter."""
    room = ctypes.create_string_buffer(8 * _MOST_INSTRUCTIONS)
    size = ctypes.c_uint(_MOST_INSTRUCTIONS)
    with taken(one.pid, one.descriptor) as end:
        asked = (end.fileno(), socket.SOL_SOCKET, _GET_FILTER, room, ctypes.byref(size))
        if _LIBRARY.getsockopt(*asked) < 0:
            raise OSError(ctypes.get_errno(), "SO_GET_FILTER")
    program = list(struct.iter_unpack("HBBI", room.raw[: 8 * size.value]))
    return {str(IPv4Address(k)) for code, _, _, k in program if code == _ONLY_IF_EQUAL} if program else None


def cut_connections(pid: int, peer: int) -> int:
    """Shuts down every TCP connection between them, as a network that resets it would; how many."""
    theirs = {(one.here, one.there) for one in sockets_of(peer) if one.state == ESTABLISHED}
    between = [one for one in sockets_of(pid) if one.state == ESTABLISHED and (one.there, one.here) in theirs]
    for one in between:
        with suppress(OSError), taken(pid, one.descriptor) as end:  # it may just have been closed
            end.shutdown(socket.SHUT_RDWR)
    return len(between)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
