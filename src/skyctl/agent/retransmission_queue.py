"""Numbered frames, kept until the other side has acknowledged them (RFC 9293's retransmission queue).

The newest are in memory, older ones in spool files of a few MiB, each removed as soon as all of its frames
are acknowledged. Frames sent are told apart from frames acknowledged: after a lost connection, sending
resumes after the last frame that arrived.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from skyctl.agent.frames import encode_frame

MAX_MEMORY_BYTES = 4 << 20
MAX_SPOOL_BYTES = 256 << 20


class _SpoolFile:
    """Frames ``first`` to ``last``, one after the other in a file that is read by offset."""

    def __init__(self, path: Path, first: int, frames: Sequence[bytes]) -> None:
        self.path = path
        self.first, self.last = first, first + len(frames) - 1
        self._offsets = [0, *accumulate(map(len, frames))]
        try:
            with path.open("wb") as file:
                file.writelines(frames)
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def bytes_after(self, number: int) -> int:
        """Size of the frames that come after that one."""
        return self._offsets[-1] - self._offsets[min(max(number, self.first - 1), self.last) + 1 - self.first]

    def read(self, number: int) -> bytes:
        """One frame. Raises OSError where the file no longer holds what was written."""
        start, stop = self._offsets[number - self.first : number - self.first + 2]
        frame = os.pread(self._fd, stop - start, start)
        if len(frame) != stop - start:
            raise OSError(f"{self.path} is not what was written")
        return frame

    def remove(self) -> None:
        """Closes and deletes the file."""
        os.close(self._fd)
        with contextlib.suppress(OSError):
            self.path.unlink()


class RetransmissionQueue:
    """Frames in order, the first one being number 1.

    Args:
        number_key: the header's key that holds a frame's number.
        spool_folder: for what memory is too small for; None: everything stays in memory.

    ``last``: the newest number. ``sent``: the newest that ``next_frame`` gave. ``acknowledged``: no frame up
    to it is kept. ``unsent_bytes``: size of the frames still to be sent. ``kept_bytes``: of all kept frames.
    """

    def __init__(self, number_key: str, spool_folder: Path | None = None) -> None:
        self.last = self.sent = self.acknowledged = 0
        self.unsent_bytes = self.kept_bytes = 0
        self._number_key = number_key
        self._spool_folder = spool_folder
        self._spool_files: deque[_SpoolFile] = deque()
        self._in_memory: deque[bytes] = deque()
        self._memory_bytes = 0
        self._spool_at_bytes = MAX_MEMORY_BYTES

    @property
    def is_full(self) -> bool:
        """Whether output lines are to be dropped: too much is kept, or no file can be written."""
        return self.kept_bytes > MAX_SPOOL_BYTES or self._memory_bytes > 2 * MAX_MEMORY_BYTES

    @property
    def _first_in_memory(self) -> int:
        return self.last - len(self._in_memory) + 1

    def push(self, message: dict[str, Any], body: bytes = b"") -> int:
        """Adds a frame and returns its number."""
        frame = encode_frame({**message, self._number_key: self.last + 1}, body) + body
        self.last += 1
        self._in_memory.append(frame)
        self.unsent_bytes += len(frame)
        self.kept_bytes += len(frame)
        self._memory_bytes += len(frame)
        if self._spool_folder is not None and self._memory_bytes > self._spool_at_bytes:
            self._spool(self._spool_folder)
        return self.last

    def next_frame(self) -> bytes | None:
        """The next frame to send, None when all were. Raises OSError where its spool file can't be read."""
        number = self.sent + 1
        if number > self.last:
            return None
        if number >= self._first_in_memory:
            frame = self._in_memory[number - self._first_in_memory]
        else:
            frame = next(file for file in self._spool_files if number <= file.last).read(number)
        self.sent = number
        self.unsent_bytes -= len(frame)
        return frame

    def acknowledge(self, number: int) -> None:
        """Drops every frame up to that number: the other side has them."""
        number = min(number, self.last)
        if number > self.sent:
            self.rewind(number)
        while self._spool_files and self._spool_files[0].last <= number:
            file = self._spool_files.popleft()
            self.kept_bytes -= file.bytes_after(0)
            file.remove()
        while self._in_memory and self._first_in_memory <= number:
            size = len(self._in_memory.popleft())
            self.kept_bytes -= size
            self._memory_bytes -= size
        self.acknowledged = max(self.acknowledged, number)

    def rewind(self, number: int) -> None:
        """Sending resumes after that number, whether the frames were sent before or not."""
        self.sent = min(max(number, self.acknowledged), self.last)
        unsent_in_memory = islice(self._in_memory, max(0, self.sent + 1 - self._first_in_memory), None)
        self.unsent_bytes = sum(map(len, unsent_in_memory))
        self.unsent_bytes += sum(file.bytes_after(self.sent) for file in self._spool_files)

    def _spool(self, folder: Path) -> None:
        """Moves everything in memory into a file. If that fails it stays, and is tried again later."""
        path = folder / f"kept-{self._number_key}-{self._first_in_memory}"
        try:
            file = _SpoolFile(path, self._first_in_memory, self._in_memory)
        except OSError:
            self._spool_at_bytes = self._memory_bytes + MAX_MEMORY_BYTES
            return
        self._spool_files.append(file)
        self._in_memory.clear()
        self._memory_bytes = 0
        self._spool_at_bytes = MAX_MEMORY_BYTES
