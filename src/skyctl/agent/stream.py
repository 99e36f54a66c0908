"""What waits to be written to a descriptor that must not block."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from skyctl.agent.wire import encode


class Outbox:
    """Frames on their way out. ``size_bytes`` tells how much still waits."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size_bytes = 0
        self._parts: deque[memoryview] = deque()
        os.set_blocking(fd, False)

    def push(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Adds a frame."""
        for part in (encode(message, body), body):
            if part:
                self._parts.append(memoryview(part))
                self.size_bytes += len(part)

    def clear(self) -> None:
        """Drops what waits."""
        self._parts.clear()
        self.size_bytes = 0

    def add(self, frame: bytes) -> None:
        """Adds a frame that is encoded already."""
        self._parts.append(memoryview(frame))
        self.size_bytes += len(frame)

    def flush(self) -> None:
        """Writes what can be written now. Raises OSError (EPIPE, …) where nobody reads any more."""
        while self._parts:
            try:
                count = os.write(self.fd, self._parts[0])
            except BlockingIOError:
                return
            self.size_bytes -= count
            rest = self._parts[0][count:]
            if rest:
                self._parts[0] = rest
            else:
                self._parts.popleft()


def read_some(fd: int, limit_bytes: int = 256 << 10) -> bytes | None:
    """What is there to read: bytes, b"" at the end, None when there is nothing just now."""
    try:
        return os.read(fd, limit_bytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""
