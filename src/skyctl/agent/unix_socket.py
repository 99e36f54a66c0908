"""The Unix socket in a session's folder, by which a launcher that reconnects finds the agent, and its relay.

The folder is its user's alone (0700), and the kernel says who connects. A socket's path may be 107 bytes
long; a longer one is reached by way of the folder's descriptor. A new connection to the node starts a process
there that carries bytes between its standard streams and that socket (``relay_streams``). A device's turns
(``turns``) are asked for over such a socket, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from skyctl.agent.frames import read_available

SOCKET_NAME = "line"
MAX_SOCKET_PATH_BYTES = 100
SESSION_ID = re.compile(r"s-[A-Za-z0-9_]+")


def listen_in_folder(folder: Path) -> socket.socket:
    """A socket that listens in that folder. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_socket_path(folder) as path:
            sock.bind(path)
        sock.listen(8)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def accept_same_user(listener: socket.socket) -> socket.socket | None:
    """The next connection; None where there is none, or it is another user's."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    if not is_same_user(sock):
        sock.close()
        return None
    return sock


def connect_to_session(sessions: Path, session_id: str) -> socket.socket:
    """A connection to that session's agent.

    Raises:
        FileNotFoundError, ConnectionRefusedError: the agent has ended.
        OSError: the agent can't be reached.
    """
    if not SESSION_ID.fullmatch(session_id):
        raise FileNotFoundError(f"{session_id!r} is no session's name")
    return connect_in_folder(sessions / session_id)


def connect_in_folder(folder: Path) -> socket.socket:
    """A connection to who listens in that folder.

    Raises:
        FileNotFoundError, ConnectionRefusedError: nobody does.
        OSError: it can't be reached.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_socket_path(folder) as path:
            sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def is_same_user(sock: socket.socket) -> bool:
    """Whether the other end belongs to our user (yes where the system can't say: the folder is ours)."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    size = struct.calcsize("3i")
    uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, option, size))[1]
    return bool(uid == os.getuid())


@contextlib.contextmanager
def _short_socket_path(folder: Path) -> Iterator[str]:
    """A path to the folder's socket that is short enough for the system."""
    path = str(folder / SOCKET_NAME)
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield path
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)


RELAY_BUFFER_BYTES = 256 << 10
RELAY_FLUSH_S = 10.0


class _RelayDirection:
    """One direction of a relay: what was read from the source and not written to the target yet."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.ended = False
        self.unwritten = b""

    def add_poll_events(self, wanted: dict[int, int]) -> None:
        """Adds what this direction waits for."""
        if self.unwritten:
            wanted[self.target] = wanted.get(self.target, 0) | select.POLLOUT
        elif not self.ended:
            wanted[self.source] = wanted.get(self.source, 0) | select.POLLIN

    def transfer(self) -> bool:
        """Reads and writes what can be now; False where its target reads no more."""
        if not self.unwritten and not self.ended:
            data = read_available(self.source, RELAY_BUFFER_BYTES)
            self.ended = data == b""
            self.unwritten = data or b""
        try:
            if self.unwritten:
                self.unwritten = self.unwritten[os.write(self.target, self.unwritten) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def relay_streams(sock: socket.socket, in_fd: int = 0, out_fd: int = 1) -> int:
    """Relays until either side has ended, and what it had sent was passed on (or could not be, for 10 s)."""
    for fd in (in_fd, out_fd, sock.fileno()):
        os.set_blocking(fd, False)
    directions = [_RelayDirection(in_fd, sock.fileno()), _RelayDirection(sock.fileno(), out_fd)]
    over_at: float | None = None
    while True:
        for direction in directions:
            if not direction.transfer() or (direction.ended and not direction.unwritten):
                return 0
        if over_at is None and any(direction.ended for direction in directions):
            over_at = time.monotonic() + RELAY_FLUSH_S
        if over_at is not None and time.monotonic() > over_at:
            return 0
        wanted = dict.fromkeys((in_fd, sock.fileno(), out_fd), 0) if over_at is None else {}
        for direction in directions:
            direction.add_poll_events(wanted)
        for fd, event in _poll_descriptors(wanted, None if over_at is None else 1000):
            if not wanted[fd] and event & (select.POLLHUP | select.POLLERR):
                over_at = (
                    time.monotonic() + RELAY_FLUSH_S
                )  # gone, while the other way has something to pass on


def _poll_descriptors(wanted: dict[int, int], timeout_ms: int | None) -> list[tuple[int, int]]:
    poll = select.poll()
    for fd, mask in wanted.items():
        poll.register(fd, mask)
    return poll.poll(timeout_ms)
