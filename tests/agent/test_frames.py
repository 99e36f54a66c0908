"""Frames: whole, in pieces, cut off, and what is none."""

from __future__ import annotations

import io
import struct

import pytest

from skyctl.agent.frames import MAX_BODY_BYTES, FrameError, FrameParser, encode_frame, read_frame, write_frame

FRAMES = [({"a": 1}, b""), ({"text": "ü\n\0"}, b"\0" * 1000), ({}, b"x"), ({"loss": float("inf")}, b"yz")]


def stream() -> bytes:
    out = io.BytesIO()
    for message, body in FRAMES:
        write_frame(out, message, body)
    return out.getvalue()


def test_there_and_back() -> None:
    fp = io.BytesIO(stream())
    assert [read_frame(fp) for _ in FRAMES] == FRAMES
    assert read_frame(fp) is None


@pytest.mark.parametrize("size", [1, 3, 7, 64, 5000])
def test_in_pieces(size: int) -> None:
    data, parser, frames = stream(), FrameParser(), []
    for at in range(0, len(data), size):
        parser.feed(data[at : at + size])
        frames += list(parser.frames())
    assert frames == FRAMES


def test_partial_writes() -> None:
    class Slow(io.RawIOBase):
        data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: memoryview) -> int:  # type: ignore[override]
            self.data += bytes(data[:3])
            return min(3, len(data))

    slow = Slow()
    write_frame(slow, {"a": 1}, b"0123456789" * 300)  # type: ignore[arg-type]
    assert read_frame(io.BytesIO(slow.data)) == ({"a": 1}, b"0123456789" * 300)


def test_cut_off_anywhere() -> None:
    out = io.BytesIO()
    write_frame(out, {"a": 1}, b"body")
    for stop in range(1, len(out.getvalue())):
        with pytest.raises(EOFError):
            read_frame(io.BytesIO(out.getvalue()[:stop]))


@pytest.mark.parametrize(
    "data",
    [
        b"Welcome to Ubuntu!\n",
        b"\0" * 20,
        struct.pack(">II", 5, 0) + b"hello",
        struct.pack(">II", 2, 0) + b"[]",
        struct.pack(">II", 2, MAX_BODY_BYTES + 1) + b"{}",
        struct.pack(">II", 60_000, 0) + b"[" * 60_000,
    ],
)
def test_garbage(data: bytes) -> None:
    parser = FrameParser()
    parser.feed(data)
    with pytest.raises(FrameError):
        parser.next_frame()
    with pytest.raises(FrameError):
        read_frame(io.BytesIO(data))


def test_too_long() -> None:
    with pytest.raises(FrameError, match="at most"):
        encode_frame({"a": "x" * (17 << 20)})
    with pytest.raises(FrameError, match="at most"):
        encode_frame({}, memoryview(bytes(MAX_BODY_BYTES + 1)))
