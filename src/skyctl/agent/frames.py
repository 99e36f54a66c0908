"""Frames: two 32-bit big-endian lengths, a JSON object as header, raw bytes as body.

JSON numbers may be NaN or infinite (a loss can be), as Python's json writes and reads them.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, BinaryIO

FRAME_LENGTHS = struct.Struct(">II")
MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 64 << 20
CHUNK_BYTES = 256 << 10
"""How much of a file goes into one frame: little enough that other traffic gets its turn."""


Message = dict[str, Any]
"""A frame's header: a JSON object."""


class FrameError(ValueError):
    """The bytes that arrived are no frame, or no message that is expected."""


def encode_frame(message: Message, body: bytes | memoryview = b"") -> bytes:
    """The lengths and the header of a frame; the body follows as it is.

    Raises:
        FrameError: header or body is over its limit.
        TypeError, ValueError: the message can't be written as JSON.
    """
    header = json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError(f"a message of {len(header)} bytes; at most {MAX_HEADER_BYTES} fit in a frame")
    if len(body) > MAX_BODY_BYTES:
        raise FrameError(f"a body of {len(body)} bytes; at most {MAX_BODY_BYTES} fit in a frame")
    return FRAME_LENGTHS.pack(len(header), len(body)) + header


def write_frame(fp: BinaryIO, message: Message, body: bytes | memoryview = b"") -> None:
    """Writes one frame and flushes. Raw files, which may write less than asked, are fine."""
    head = encode_frame(message, body)
    if len(body) <= CHUNK_BYTES:
        _write_all(fp, head + bytes(body))
    else:
        _write_all(fp, head)
        _write_all(fp, body)
    fp.flush()


def read_frame(fp: BinaryIO) -> tuple[Message, bytes] | None:
    """Reads one frame; None at end of file.

    Raises:
        EOFError: the file ended within a frame.
        FrameError: what arrived is not a frame.
    """
    head = _read_exactly(fp, FRAME_LENGTHS.size, at_start=True)
    if head is None:
        return None
    header_bytes, body_bytes = _unpack_lengths(head)
    header = _read_exactly(fp, header_bytes) or b""
    body = _read_exactly(fp, body_bytes) or b""
    return _parse_header(header), body


class FrameParser:
    """Frames from a byte stream that arrives in pieces: ``feed`` the pieces, iterate the frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds bytes that were read from the stream."""
        self._buffer += data

    def frames(self) -> Iterator[tuple[Message, bytes]]:
        """The frames that are complete by now. Raises FrameError where it is none."""
        while (frame := self.next_frame()) is not None:
            yield frame

    def next_frame(self) -> tuple[Message, bytes] | None:
        """The next complete frame, or None. Raises FrameError where it is none."""
        if len(self._buffer) < FRAME_LENGTHS.size:
            return None
        header_bytes, body_bytes = _unpack_lengths(self._buffer)
        start, stop = FRAME_LENGTHS.size + header_bytes, FRAME_LENGTHS.size + header_bytes + body_bytes
        if len(self._buffer) < stop:
            return None
        message = _parse_header(bytes(self._buffer[FRAME_LENGTHS.size : start]))
        body = bytes(self._buffer[start:stop])
        del self._buffer[:stop]
        return message, body


def _unpack_lengths(head: bytes | bytearray) -> tuple[int, int]:
    header_bytes, body_bytes = FRAME_LENGTHS.unpack_from(head)
    if not 2 <= header_bytes <= MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise FrameError(f"not a frame: it begins with {bytes(head[: FRAME_LENGTHS.size])!r}")
    return header_bytes, body_bytes


def _parse_header(header: bytes) -> Message:
    try:
        message = json.loads(header)
    except (ValueError, RecursionError) as exc:
        raise FrameError(f"a frame's header is not JSON: {header[:40]!r}") from exc
    if not isinstance(message, dict):
        raise FrameError(f"a frame's header is not an object: {header[:40]!r}")
    return message


def _write_all(fp: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[fp.write(view) or 0 :]


def _read_exactly(fp: BinaryIO, count: int, at_start: bool = False) -> bytes | None:
    parts: list[bytes] = []
    missing = count
    while missing:
        part = fp.read(missing)
        if not part:
            if at_start and missing == count:
                return None
            raise EOFError(f"the stream ended {missing} bytes before the end of a frame")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


class FrameWriteBuffer:
    """Frames to be written to a descriptor that must not block. ``unsent_bytes``: how much still waits."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.unsent_bytes = 0
        self._parts: deque[memoryview] = deque()
        os.set_blocking(fd, False)

    def push(self, message: Message, body: bytes = b"") -> None:
        """Adds a frame to be written."""
        for part in (encode_frame(message, body), body):
            if part:
                self._parts.append(memoryview(part))
                self.unsent_bytes += len(part)

    def clear(self) -> None:
        """Drops everything that was not written yet."""
        self._parts.clear()
        self.unsent_bytes = 0

    def push_encoded(self, frame: bytes) -> None:
        """Adds a frame that is encoded already."""
        self._parts.append(memoryview(frame))
        self.unsent_bytes += len(frame)

    def flush(self) -> None:
        """Writes what can be written now. Raises OSError (EPIPE, …) where nobody reads any more."""
        while self._parts:
            try:
                count = os.write(self.fd, self._parts[0])
            except BlockingIOError:
                return
            self.unsent_bytes -= count
            rest = self._parts[0][count:]
            if rest:
                self._parts[0] = rest
            else:
                self._parts.popleft()


def read_available(fd: int, limit_bytes: int = 256 << 10) -> bytes | None:
    """The bytes that can be read from the descriptor now: b"" at its end, None where there is nothing yet."""
    try:
        return os.read(fd, limit_bytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""
