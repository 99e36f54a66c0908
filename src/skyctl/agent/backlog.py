"""Numbered frames, kept until the other side has acknowledged them: in memory, and beyond that in files.

The oldest stand in files of a few MiB each, removed as soon as all in them is acknowledged; the newest in
memory. What has been sent is told apart from what has been acknowledged: after a connection was lost, sending
goes back to the last one that arrived.
"""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from skyctl.agent.wire import HEAD, encode

MEMORY_BYTES = 4 << 20
SPOOL_BYTES = 256 << 20


class _Segment(NamedTuple):
    first: int
    last: int
    path: Path
    size_bytes: int


class Backlog:
    """Frames in order, the first one being number 1.

    Args:
        key: the header's key that says the number.
        spool: the folder for what memory is too small for; None: all stays in memory.

    ``last``: the newest number. ``sent``: the newest that ``next`` gave. ``acknowledged``: none up to it is
    kept. ``size_bytes``: what is still to be sent. ``kept_bytes``: all that is kept.
    """

    def __init__(self, key: str, spool: Path | None = None) -> None:
        self.last = self.sent = self.acknowledged = 0
        self.size_bytes = self.kept_bytes = 0
        self._key = key
        self._spool = spool
        self._segments: deque[_Segment] = deque()
        self._recent: deque[bytes] = deque()
        self._recent_first = 1
        self._recent_bytes = 0
        self._spill_at_bytes = MEMORY_BYTES
        self._loaded: tuple[_Segment, list[bytes]] | None = None

    @property
    def full(self) -> bool:
        """Whether lines are to be left out: too much is kept, or no file can be written."""
        return self.kept_bytes > SPOOL_BYTES or self._recent_bytes > 2 * MEMORY_BYTES

    def push(self, message: dict[str, Any], body: bytes = b"") -> int:
        """Adds a frame; its number."""
        data = encode({**message, self._key: self.last + 1}, body) + body
        self.last += 1
        self._recent.append(data)
        self.size_bytes += len(data)
        self.kept_bytes += len(data)
        self._recent_bytes += len(data)
        if self._spool is not None and self._recent_bytes > self._spill_at_bytes:
            self._spill(self._spool)
        return self.last

    def next(self) -> bytes | None:
        """The next frame to be sent. Raises OSError where its file can't be read."""
        if self.sent >= self.last:
            return None
        data = self._frame(self.sent + 1)
        self.sent += 1
        self.size_bytes -= len(data)
        return data

    def acknowledge(self, number: int) -> None:
        """Nothing up to that number is needed any more."""
        number = min(number, self.last)
        if number > self.sent:
            self.rewind(number)
        while self._segments and self._segments[0].last <= number:
            segment = self._segments.popleft()
            self.kept_bytes -= segment.size_bytes
            with contextlib.suppress(OSError):
                segment.path.unlink()
        while self._recent and self._recent_first <= number:
            data = self._recent.popleft()
            self._recent_first += 1
            self.kept_bytes -= len(data)
            self._recent_bytes -= len(data)
        self.acknowledged = max(self.acknowledged, number)

    def rewind(self, number: int) -> None:
        """What comes after that number is to be sent, again or for the first time."""
        self.sent = min(max(number, self.acknowledged), self.last)
        left = sum(len(data) for data in self._recent)
        for index in range(max(0, self.sent - self._recent_first + 1)):
            left -= len(self._recent[index])
        for segment in self._segments:
            if segment.first > self.sent:
                left += segment.size_bytes
            elif segment.last > self.sent:
                left += sum(len(data) for data in self._load(segment)[self.sent + 1 - segment.first :])
        self.size_bytes = left

    def _frame(self, number: int) -> bytes:
        if number >= self._recent_first:
            self._loaded = None
            return self._recent[number - self._recent_first]
        segment = next(segment for segment in self._segments if number <= segment.last)
        return self._load(segment)[number - segment.first]

    def _load(self, segment: _Segment) -> list[bytes]:
        if self._loaded is None or self._loaded[0] != segment:
            data = segment.path.read_bytes()
            frames = _split(data)
            if len(data) != segment.size_bytes or len(frames) != segment.last - segment.first + 1:
                raise OSError(f"{segment.path} is not what was written")
            self._loaded = segment, frames
        return self._loaded[1]

    def _spill(self, folder: Path) -> None:
        """Everything in memory goes into a file. Where that fails it stays, and is tried again later."""
        path = folder / f"kept-{self._key}-{self._recent_first}"
        try:
            with path.open("wb") as file:
                file.writelines(self._recent)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            self._spill_at_bytes = self._recent_bytes + MEMORY_BYTES
            return
        self._segments.append(_Segment(self._recent_first, self.last, path, self._recent_bytes))
        self._recent.clear()
        self._recent_first, self._recent_bytes = self.last + 1, 0
        self._spill_at_bytes = MEMORY_BYTES


def _split(data: bytes) -> list[bytes]:
    frames = []
    at = 0
    while at + HEAD.size <= len(data):
        stop = at + HEAD.size + sum(HEAD.unpack_from(data, at))
        frames.append(data[at:stop])
        at = stop
    return frames
