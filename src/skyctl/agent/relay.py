"""Carries bytes between this process's standard streams and a session's agent, for a launcher come back.

It knows nothing of frames. It ends when either side does; at most 256 KiB wait for a slow one, each way.
"""

from __future__ import annotations

import os
import select
import socket
import time

from skyctl.agent.stream import read_some

BUFFER_BYTES = 256 << 10
LAST_WORDS_S = 10.0


class _Way:
    """One direction."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.ended = False
        self.waiting = b""

    def interests(self, wanted: dict[int, int]) -> None:
        """Adds what this direction waits for."""
        if self.waiting:
            wanted[self.target] = wanted.get(self.target, 0) | select.POLLOUT
        elif not self.ended:
            wanted[self.source] = wanted.get(self.source, 0) | select.POLLIN

    def turn(self) -> bool:
        """Reads and writes what can be now; False where its target reads no more."""
        if not self.waiting and not self.ended:
            data = read_some(self.source, BUFFER_BYTES)
            self.ended = data == b""
            self.waiting = data or b""
        try:
            if self.waiting:
                self.waiting = self.waiting[os.write(self.target, self.waiting) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def run(sock: socket.socket, in_fd: int = 0, out_fd: int = 1) -> int:
    """Until either side has ended, and what had come from it is passed on (or can't be, for 10 s)."""
    for fd in (in_fd, out_fd, sock.fileno()):
        os.set_blocking(fd, False)
    ways = [_Way(in_fd, sock.fileno()), _Way(sock.fileno(), out_fd)]
    over_at: float | None = None
    while True:
        for way in ways:
            if not way.turn() or (way.ended and not way.waiting):
                return 0
        if over_at is None and any(way.ended for way in ways):
            over_at = time.monotonic() + LAST_WORDS_S
        if over_at is not None and time.monotonic() > over_at:
            return 0
        wanted = dict.fromkeys((in_fd, sock.fileno(), out_fd), 0) if over_at is None else {}
        for way in ways:
            way.interests(wanted)
        for fd, event in _poll(wanted, None if over_at is None else 1000):
            if not wanted[fd] and event & (select.POLLHUP | select.POLLERR):
                over_at = (
                    time.monotonic() + LAST_WORDS_S
                )  # gone, while the other way has something to pass on


def _poll(wanted: dict[int, int], timeout_ms: int | None) -> list[tuple[int, int]]:
    poll = select.poll()
    for fd, mask in wanted.items():
        poll.register(fd, mask)
    return poll.poll(timeout_ms)
