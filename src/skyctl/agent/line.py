"""The agent's line to its launcher: one connection, on standard input and what was standard output.

``HeldLine`` (``held.py``) is the one that outlives its connections.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from typing import Any

from skyctl.agent.backlog import Backlog
from skyctl.agent.stream import Outbox, read_some
from skyctl.agent.wire import Parser, WireError

HIGH_BYTES = 4 << 20
LOG_HIGH_BYTES = 2 << 20
LAST_WORDS_S = 2.0
Message = dict[str, Any]
GONE = "the launcher is gone"


class Line:
    """The end of the connection is the end of the agent.

    ``over``: why the agent is to end, once it is. ``ending``: why it does.
    """

    def __init__(self, lease_s: float, in_fd: int, out_fd: int) -> None:
        self.over: str | None = None
        self.ending: str | None = None
        self._lease_s = lease_s
        self._heard_at = time.monotonic()
        self._in_fd = in_fd
        self._outbox = Outbox(out_fd)
        self._parser = Parser()
        self._listening = True
        os.set_blocking(in_fd, False)

    @property
    def replies(self) -> Outbox | Backlog:
        """What ``Files`` writes to."""
        return self._outbox

    @property
    def crowded(self) -> bool:
        """Whether lines of output are to be left out."""
        return self._outbox.size_bytes > LOG_HIGH_BYTES

    @property
    def stuffed(self) -> bool:
        """Whether tasks are to wait with what they say."""
        return self._outbox.size_bytes >= HIGH_BYTES

    @property
    def pause_s(self) -> float:
        """How long the agent may sleep."""
        return max(0.05, min(1.0, self._lease_s / 4))

    def push(self, message: Message, body: bytes = b"") -> int:
        """What must reach the launcher; its number, 0 where it has none."""
        self._outbox.push(message, body)
        return 0

    def tell(self, message: Message) -> None:
        """What is worth telling only to who is there now."""
        self._outbox.push(message)

    def interests(self) -> dict[int, int]:
        """Descriptors and what to wait for there."""
        wanted = {self._in_fd: select.POLLIN} if self._listening else {}
        if self._outbox.size_bytes:
            wanted[self._outbox.fd] = wanted.get(self._outbox.fd, 0) | select.POLLOUT
        return wanted

    def read(self, ready: dict[int, int]) -> Iterator[tuple[Message, bytes]]:
        """The frames that have come and are the agent's to act on."""
        data = read_some(self._in_fd) if self._in_fd in ready and self._listening else None
        if data is None:
            return
        if not data:
            self._listening, self.over = False, GONE
            return
        self._heard_at = time.monotonic()
        self._parser.feed(data)
        try:
            for message, body in self._parser.frames():
                if message.get("op") == "ping":
                    self._outbox.push({"op": "pong"})
                else:
                    yield message, body
        except WireError as exc:
            self._listening, self.over = False, f"what the launcher sends makes no sense: {exc}"

    def flush(self) -> None:
        """Writes what can be written now."""
        try:
            self._outbox.flush()
        except OSError:
            self._outbox.clear()
            self.over = GONE

    def watch(self) -> None:
        """Notes that the launcher has been silent for too long."""
        if time.monotonic() - self._heard_at > self._lease_s:
            self.over = f"it had not heard from the launcher for {self._lease_s:g} s"

    def drain(self) -> None:
        """The agent ends; its folder is still there."""

    def finish(self, message: Message) -> None:
        """The last message, and all that still waits, for up to 2 s."""
        self._outbox.push(message)
        deadline = time.monotonic() + LAST_WORDS_S
        self.flush()
        while self._outbox.size_bytes and time.monotonic() < deadline:
            select.select([], [self._outbox.fd], [], 0.1)
            self.flush()
