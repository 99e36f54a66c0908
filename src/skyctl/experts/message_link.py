"""One end of a connection that carries messages with tensors, between a rank and an expert host.

A message is the agents' frames (``agent.frames``): a JSON header, whose ``tensors`` says the dtype and shape
of each tensor, then their bytes, in pieces. Both ends send a word when they have nothing to say, so who is
stopped or cut off is known as silent.
"""

from __future__ import annotations

import ctypes
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from skyctl.agent.frames import FrameError, FrameParser, encode_frame
from skyctl.transport.handshake import AuthenticatedSocket, os_error_reason
from skyctl.transport.tls_identity import TlsIdentity

SETUP_TIMEOUT_S = 60.0
"""From an authenticated socket to one that carries messages."""
BEAT_S = 2.0
SILENT_S = 20.0
"""An end that says nothing for so long is lost."""
MAX_TENSORS = 10_000
MAX_MESSAGE_BYTES = 1 << 36
_PIECE_BYTES = 1 << 20
_READ_BYTES = 1 << 18
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_BEAT = encode_frame({"op": "alive"})

OnMessage = Callable[[dict[str, Any], list[Tensor]], None]
OnEnd = Callable[[str], None]


class MessageLink:
    """A connection's end; a thread of its own moves all bytes, and calls what it is given.

    Args:
        admitted: whose other end has proved itself; this owns it from now on.
        name: of the other end, in the thread's name.
        server: this end has listened.
        identity: both ends' TLS certificate; None: nothing is encrypted.

    Raises:
        OSError: the other end breaks off, or shows another certificate.
        RunError: this Python has no TLS 1.3.
    """

    def __init__(
        self, admitted: AuthenticatedSocket, name: str, *, server: bool, identity: TlsIdentity | None
    ) -> None:
        sock: socket.socket = admitted.sock
        self._not_now: tuple[type[OSError], ...] = (BlockingIOError,)
        try:
            if identity is not None:
                sock = identity.wrap(admitted, server=server, timeout_s=SETUP_TIMEOUT_S)
                import ssl  # a Python without it can still train in the clear

                self._not_now = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
        except BaseException:
            admitted.sock.close()
            raise
        sock.setblocking(False)
        self._sock, self._parser = sock, FrameParser()
        self._lock = threading.Lock()
        self._out: deque[memoryview] = deque()
        self._closed = False
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._header: dict[str, Any] | None = None
        self._missing, self._pieces = 0, bytearray()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"messages with {name}")

    def start(self, on_message: OnMessage, on_end: OnEnd) -> None:
        """From now on messages are taken in.

        Args:
            on_message: called in the link's thread with a message's header and tensors; ValueError or
                FrameError from it end the link.
            on_end: called there at the end, with why; not after ``close``.
        """
        self._on_message, self._on_end = on_message, on_end
        self._thread.start()

    def send(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> int:
        """Starts sending, and returns how many bytes the tensors have; they may change afterwards.

        On a link that has ended nothing is sent.
        """
        here = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
        kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in here]
        body = memoryview(b"".join(map(_bytes_of, here)))
        frames = [memoryview(encode_frame({**header, "tensors": kinds}))]
        for start in range(0, len(body), _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            frames += [memoryview(encode_frame({}, piece)), piece]
        with self._lock:
            if not self._closed:
                self._out.extend(frames)
        self._wake()
        return len(body)

    def close(self) -> None:
        """Ends the connection; what was not sent by then is not. Idempotent."""
        self._closed = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        if self._thread.ident is None:
            self._dispose()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_sender.send(b"\0")

    def _dispose(self) -> None:
        for sock in (self._sock, self._wake_sender, self._wake_receiver):
            sock.close()

    def _run(self) -> None:
        try:
            self._move_until_closed()
        except (OSError, ValueError) as exc:
            reason = os_error_reason(exc) if isinstance(exc, OSError) else str(exc)
            is_closed, self._closed = self._closed, True
            if not is_closed:
                self._on_end(reason)
        finally:
            with self._lock:
                self._closed = True
                self._out.clear()
            self._dispose()

    def _move_until_closed(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_receiver, select.POLLIN)
        heard_at = said_at = time.monotonic()
        while not self._closed:
            wrote, read = self._write(), self._read()
            now = time.monotonic()
            heard_at, said_at = (now if read else heard_at), (now if wrote else said_at)
            if now - heard_at > SILENT_S:
                raise TimeoutError(f"not heard for {SILENT_S:.0f} s")
            if now - said_at > BEAT_S:
                with self._lock:
                    if not self._out:
                        self._out.append(memoryview(_BEAT))
                continue
            if wrote or read:
                continue
            poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
            poll.poll(1000 * BEAT_S)
            with suppress(BlockingIOError):
                self._wake_receiver.recv(4096)

    def _write(self) -> bool:
        with self._lock:
            first = self._out[0] if self._out else None
        if first is None:
            return False
        try:
            sent = self._sock.send(first)
        except self._not_now:
            return False
        with self._lock:
            if sent == len(first):
                self._out.popleft()
            else:
                self._out[0] = first[sent:]
        return True

    def _read(self) -> bool:
        try:
            data = self._sock.recv(_READ_BYTES)
        except self._not_now:
            return False
        if not data:
            raise ConnectionResetError("it has closed the connection")
        self._parser.feed(data)
        for header, body in self._parser.frames():
            self._take(header, body)
        return True

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        """A frame: a message's header, or a piece of its tensors."""
        if self._header is None:
            if header.get("op") == "alive":
                return
            if body:
                raise FrameError("a message does not begin with its header")
            self._header, self._pieces = header, bytearray()
            self._missing = sum(_size(kind) for kind in _kinds(header))
            if self._missing > MAX_MESSAGE_BYTES:
                raise FrameError(f"a message of {self._missing} bytes; at most {MAX_MESSAGE_BYTES} are taken")
        else:
            if header or not 0 < len(body) <= self._missing:
                raise FrameError("a message has other bytes than its header says")
            self._pieces += body
            self._missing -= len(body)
        if not self._missing:
            header, self._header = self._header, None
            kinds = _kinds(header)
            del header["tensors"]
            self._on_message(header, _tensors(kinds, self._pieces))


def _kinds(header: Mapping[str, Any]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    given = header.get("tensors")
    if not isinstance(given, list) or len(given) > MAX_TENSORS:
        raise FrameError("a message does not say which tensors it has")
    kinds = []
    for kind in given:
        is_pair = isinstance(kind, list) and len(kind) == 2
        dtype = _DTYPES.get(kind[0]) if is_pair and isinstance(kind[0], str) else None
        shape = kind[1] if dtype is not None else None
        if dtype is None or not isinstance(shape, list) or len(shape) > 16:
            raise FrameError(f"a message has a tensor of kind {str(kind)[:60]}")
        if not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
            raise FrameError(f"a message has a tensor of shape {str(shape)[:60]}")
        kinds.append((dtype, tuple(shape)))
    return kinds


def _size(kind: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return kind[0].itemsize * prod(kind[1])


def _tensors(kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]], data: bytearray) -> list[Tensor]:
    tensors, start = [], 0
    for kind in kinds:
        stop = start + _size(kind)
        if stop == start:
            tensors.append(torch.empty(kind[1], dtype=kind[0]))
        else:  # of its own memory, which is aligned
            tensors.append(torch.frombuffer(data[start:stop], dtype=kind[0]).view(kind[1]))
        start = stop
    return tensors


def _bytes_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
