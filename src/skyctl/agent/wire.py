"""Frames: ``>II`` header length and body length, a JSON object as header, raw bytes as body.

Knows nothing of processes or sockets: any binary file will do. JSON numbers may be NaN or infinite (a loss
can be), as Python's json writes and reads them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

HEAD = struct.Struct(">II")
MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 64 << 20
CHUNK_BYTES = 256 << 10
"""How much of a file goes into one frame: at most 1 MiB, so that other traffic gets its turn."""


class WireError(ValueError):
    """What came is not a frame: too long, not JSON, not an object."""


def encode(message: dict[str, Any], body: bytes | memoryview = b"") -> bytes:
    """The head and the header of a frame; the body follows as it is.

    Raises:
        WireError: header or body over its limit.
        TypeError, ValueError: the message can't be written as JSON.
    """
    header = json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"a message of {len(header)} bytes; at most {MAX_HEADER_BYTES} fit in a frame")
    if len(body) > MAX_BODY_BYTES:
        raise WireError(f"a body of {len(body)} bytes; at most {MAX_BODY_BYTES} fit in a frame")
    return HEAD.pack(len(header), len(body)) + header


def write_frame(fp: BinaryIO, message: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Writes one frame and flushes. Raw files, which may write less than asked, are fine."""
    head = encode(message, body)
    if len(body) <= CHUNK_BYTES:
        _write_all(fp, head + bytes(body))
    else:
        _write_all(fp, head)
        _write_all(fp, body)
    fp.flush()


def read_frame(fp: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Reads one frame; None at end of file.

    Raises:
        EOFError: the file ended within a frame.
        WireError: what came is not a frame.
    """
    head = _read_exactly(fp, HEAD.size, at_start=True)
    if head is None:
        return None
    header_bytes, body_bytes = _lengths(head)
    header = _read_exactly(fp, header_bytes) or b""
    body = _read_exactly(fp, body_bytes) or b""
    return _message(header), body


class Parser:
    """Frames from a byte stream that comes in pieces: ``feed`` the pieces, iterate the frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds what was read."""
        self._buffer += data

    def frames(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The frames that are complete by now. Raises WireError where it is none."""
        while (frame := self.next()) is not None:
            yield frame

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """The next complete frame, or None. Raises WireError where it is none."""
        if len(self._buffer) < HEAD.size:
            return None
        header_bytes, body_bytes = _lengths(self._buffer)
        start, stop = HEAD.size + header_bytes, HEAD.size + header_bytes + body_bytes
        if len(self._buffer) < stop:
            return None
        message = _message(bytes(self._buffer[HEAD.size : start]))
        body = bytes(self._buffer[start:stop])
        del self._buffer[:stop]
        return message, body


def _lengths(head: bytes | bytearray) -> tuple[int, int]:
    header_bytes, body_bytes = HEAD.unpack_from(head)
    if not 2 <= header_bytes <= MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise WireError(f"not a frame: it begins with {bytes(head[: HEAD.size])!r}")
    return header_bytes, body_bytes


def _message(header: bytes) -> dict[str, Any]:
    try:
        message = json.loads(header)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"a frame's header is not JSON: {header[:40]!r}") from exc
    if not isinstance(message, dict):
        raise WireError(f"a frame's header is not an object: {header[:40]!r}")
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
