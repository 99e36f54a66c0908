"""The socket in a session's folder, where a launcher that comes back finds the agent.

The folder is its user's alone (0700), and who connects is asked for. A socket's path may be 107 bytes long;
a longer one is reached by way of the folder's descriptor.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

NAME = "line"
PATH_BYTES = 100
SESSION_ID = re.compile(r"s-[A-Za-z0-9_]+")


def listen(folder: Path) -> socket.socket:
    """The agent's socket, listening. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(folder) as path:
            sock.bind(path)
        sock.listen(8)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def admit(listener: socket.socket) -> socket.socket | None:
    """Who has come; None where nobody has, or it is another user."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    if not same_user(sock):
        sock.close()
        return None
    return sock


def enter(sessions: Path, session_id: str) -> socket.socket:
    """A connection to that session's agent.

    Raises:
        FileNotFoundError, ConnectionRefusedError: there is none any more.
        OSError: it can't be reached.
    """
    if not SESSION_ID.fullmatch(session_id):
        raise FileNotFoundError(f"{session_id!r} is no session's name")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(sessions / session_id) as path:
            sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def same_user(sock: socket.socket) -> bool:
    """Whether the other end belongs to our user (yes where the system can't say: the folder is ours)."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    size = struct.calcsize("3i")
    uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, option, size))[1]
    return bool(uid == os.getuid())


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """The socket's path, short enough."""
    path = str(folder / NAME)
    if len(os.fsencode(path)) <= PATH_BYTES:
        yield path
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)
