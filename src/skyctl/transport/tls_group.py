"""Messages between two ranks through TLS: what ``PeerConnection`` uses of a Gloo group, encrypted.

As with Gloo a payload moves once its receiver is ready: posting a receive sends a word of that tag, and a
send waits for such a word. So every payload goes straight into the memory it is meant for, nothing is
buffered, and two ends that both send much never block each other.

A frame is a kind (one byte), a tag (32 bits), a length (64 bits) and, for data, the payload; little-endian.

One thread a pair reads and writes, since an OpenSSL connection is not for two at a time. A failure, a
time-out included, ends all that is in flight and the connection, as with Gloo.
"""

from __future__ import annotations

import ctypes
import select
import socket
import ssl
import struct
import threading
from collections import defaultdict, deque
from contextlib import suppress
from datetime import timedelta

import torch

from skyctl.transport.handshake import os_error_reason
from skyctl.transport.transfer_errors import TransferClosedError, TransferTimeoutError

Tensor = torch.Tensor

_TLS_FRAME = struct.Struct("<BIQ")
_RECEIVE_READY, _PAYLOAD = 1, 2
_WRITE_BYTES = 256 << 10
"""Given to TLS at a time; it cuts that into records of 16 KiB."""
_INLINE_PAYLOAD_BYTES = 8 << 10
"""Payloads up to this go into one record with their frame."""
_TURNS_BEFORE_SWITCH = 16
"""Reads, or writes, before it is the other's turn."""
_READ, _WRITE = select.POLLIN, select.POLLOUT


class _ProtocolError(ConnectionError):
    """The other end does not speak as it should."""


def _transfer_error(exc: OSError) -> RuntimeError:
    if isinstance(exc, ConnectionResetError | BrokenPipeError | ConnectionRefusedError):
        return TransferClosedError(os_error_reason(exc))
    cls = TransferTimeoutError if isinstance(exc, TimeoutError) else RuntimeError
    return cls(os_error_reason(exc))


class TlsTransfer:
    """A transfer in flight; it holds its tensor for as long as it exists itself."""

    __slots__ = ("_done", "_error", "_group", "_tensor", "nbytes", "tag")

    def __init__(self, group: TlsProcessGroup, tensor: Tensor, tag: int) -> None:
        self._group, self._tensor, self.tag = group, tensor, tag
        self.nbytes = tensor.numel() * tensor.element_size()
        self._done = threading.Event()
        self._error: RuntimeError | None = None

    def memory(self) -> memoryview:
        """The tensor's own bytes (without numpy, which a node may not have)."""
        if not self.nbytes:
            return memoryview(b"")
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self._tensor.data_ptr())).cast("B")

    def finish(self, error: RuntimeError | None = None) -> None:
        """Marks the transfer as done, or failed with that error."""
        self._error = error
        self._done.set()

    def wait(self, limit: timedelta) -> None:
        """Returns when it is over; raises RuntimeError, as Gloo's transfers do."""
        if not self._done.wait(limit.total_seconds()):
            self._group.fail(TransferClosedError("a transfer timed out, which closes the connection"))
            raise TransferTimeoutError(f"no transfer for {limit.total_seconds():g} s")
        if self._error is not None:
            raise type(self._error)(str(self._error))


class TlsProcessGroup:
    """One end. Tensors are contiguous and on the CPU, one a message; ``close`` ends the thread.

    Args:
        sock: connected, its handshake done; this owns it from now on.
        peer: in the thread's name.
    """

    def __init__(self, sock: ssl.SSLSocket, peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self._error: RuntimeError | None = None
        self._unrequested: dict[int, deque[TlsTransfer]] = defaultdict(deque)
        self._requested: dict[int, int] = defaultdict(int)
        self._sendable: deque[TlsTransfer] = deque()
        self._posted: dict[int, deque[TlsTransfer]] = defaultdict(deque)
        self._control_frames = bytearray()
        self._is_waiting = False
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        # the thread's own
        self._out: deque[memoryview] = deque()
        self._sending: TlsTransfer | None = None
        self._frame = memoryview(bytearray(_TLS_FRAME.size))
        self._into, self._filled = self._frame, 0
        self._receiving: TlsTransfer | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"tls with {peer}")
        self._thread.start()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> TlsTransfer:  # noqa: ARG002 — as Gloo's
        """Starts sending; raises RuntimeError where the connection is gone."""
        work = TlsTransfer(self, tensors[0], tag)
        with self._lock:
            self._check_open()
            if self._requested[tag]:
                self._requested[tag] -= 1
                self._sendable.append(work)
                self._wake()
            else:
                self._unrequested[tag].append(work)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> TlsTransfer:  # noqa: ARG002 — as Gloo's
        """Starts receiving; raises RuntimeError where the connection is gone."""
        work = TlsTransfer(self, tensors[0], tag)
        with self._lock:
            self._check_open()
            self._posted[tag].append(work)
            self._control_frames += _TLS_FRAME.pack(_RECEIVE_READY, tag, 0)
            self._wake()
        return work

    def fail(self, error: RuntimeError) -> None:
        """Ends everything in flight with that error; the first one counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            queues = [self._sendable, *self._unrequested.values(), *self._posted.values()]
            ended = [work for queue in queues for work in queue]
            for queue in queues:
                queue.clear()
            self._wake()
        for work in ended:
            work.finish(self._error)

    def close(self) -> None:
        """Ends what is still under way, the thread and the connection. Idempotent."""
        self.fail(TransferClosedError("the connection is closed"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_open(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _wake(self) -> None:
        """Wakes the thread, under the lock."""
        if self._is_waiting:
            self._is_waiting = False
            with suppress(OSError):
                self._wake_sender.send(b"\0")

    def _run(self) -> None:
        try:
            self._transfer_until_failed()
            error: RuntimeError = TransferClosedError("the connection is closed")
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            error = TransferClosedError("the peer has closed the connection")
        except OSError as exc:
            error = _transfer_error(exc)
        self.fail(error)
        for work in (self._sending, self._receiving):
            if work is not None:
                work.finish(self._error)
        for sock in (self._sock, self._wake_sender, self._wake_receiver):
            sock.close()

    def _transfer_until_failed(self) -> None:
        """Reads and writes in turn until the connection fails; waits where neither gets any further."""
        poll = select.poll()
        poll.register(self._sock, _READ)
        poll.register(self._wake_receiver, _READ)
        while self._error is None:
            wrote = self._write()
            if self._read() or wrote:
                continue
            with self._lock:
                if self._error is not None or (not self._out and (self._control_frames or self._sendable)):
                    continue
                self._is_waiting = True
            poll.modify(self._sock, _READ | _WRITE if self._out else _READ)
            poll.poll()
            with self._lock:
                self._is_waiting = False
            with suppress(BlockingIOError):
                self._wake_receiver.recv(64)

    def _write(self) -> bool:
        """Writes for some turns; whether anything was written."""
        moved = False
        for _ in range(_TURNS_BEFORE_SWITCH):
            if not self._out and not self._queue_next():
                break
            view = self._out[0]
            try:
                sent = self._sock.send(view[:_WRITE_BYTES])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            moved = True
            if sent < len(view):
                self._out[0] = view[sent:]
                continue
            self._out.popleft()
            if not self._out and self._sending is not None:
                done, self._sending = self._sending, None
                done.finish()
        return moved

    def _queue_next(self) -> bool:
        """Queues what is to be written next: the control frames so far, and one message."""
        with self._lock:
            head, self._control_frames = self._control_frames, bytearray()
            work = self._sendable.popleft() if self._sendable else None
        if work is not None:
            head += _TLS_FRAME.pack(_PAYLOAD, work.tag, work.nbytes)
            self._sending = work
            if work.nbytes <= _INLINE_PAYLOAD_BYTES:
                head += work.memory()
            else:
                self._out.append(work.memory())
        if head:
            self._out.appendleft(memoryview(head))
        return bool(head)

    def _read(self) -> bool:
        """Reads for some turns; whether anything was read."""
        moved = False
        for _ in range(_TURNS_BEFORE_SWITCH):
            try:
                got = self._sock.recv_into(self._into[self._filled :])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            if not got:
                raise ssl.SSLEOFError
            moved = True
            self._filled += got
            if self._filled == len(self._into):
                self._handle_filled()
        return moved

    def _handle_filled(self) -> None:
        """A whole frame has arrived, or the payload that it announced."""
        if self._receiving is not None:
            done, self._receiving = self._receiving, None
            self._into, self._filled = self._frame, 0
            done.finish()
            return
        kind, tag, nbytes = _TLS_FRAME.unpack(self._frame)
        self._filled = 0
        if kind == _RECEIVE_READY:
            with self._lock:
                if self._unrequested[tag]:
                    self._sendable.append(self._unrequested[tag].popleft())
                else:
                    self._requested[tag] += 1
            return
        if kind != _PAYLOAD:
            raise _ProtocolError(f"the peer sent a frame of kind {kind}")
        with self._lock:
            if self._error is not None:
                return
            if not self._posted[tag]:
                raise _ProtocolError(f"the peer sent a message of tag {tag} that nobody waits for")
            work = self._posted[tag].popleft()
        self._receiving = work
        if work.nbytes != nbytes:
            raise _ProtocolError(f"the peer sent {nbytes} bytes where {work.nbytes} are expected")
        if nbytes:
            self._into = work.memory()
        else:
            self._receiving = None
            work.finish()
