"""Messages between two ranks over one connection: which send meets which receive. How bytes move: a subclass.

A payload moves once its receiver is ready: posting a receive sends a word of that tag, and a send waits for
one. So payloads go straight into their tensors, and both ends may send much at once. Messages of one tag keep
their order; tags do not wait for each other. A frame is its kind, the tag (32 bits), the length (64 bits)
and, for data, the payload; little-endian.

A failure, a time-out included, ends all that is in flight and the connection.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from skyctl.transport.handshake import os_error_reason
from skyctl.transport.transfer_errors import TransferClosedError, TransferFrameError, TransferTimeoutError

Tensor = torch.Tensor

FRAME = struct.Struct("<BIQ")
_RECEIVE_READY, _PAYLOAD = 1, 2


class UnexpectedFrameError(ConnectionError):
    """The other end does not speak as it should; the message goes on from its name."""


class Transfer:
    """A message in flight; it holds its tensor for as long as it exists itself."""

    __slots__ = ("_done", "_error", "_tensor", "_transport", "nbytes", "tag")

    def __init__(self, transport: MessageTransport, tensor: Tensor, tag: int) -> None:
        self._transport, self._tensor, self.tag = transport, tensor, tag
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

    def is_over(self, wait_s: float = 0.0) -> bool:
        """Whether it is done or has failed, now or within that time; unlike ``wait`` it ends nothing."""
        return self._done.wait(wait_s)

    def wait(self, limit: timedelta) -> None:
        """Returns when it is done.

        Raises:
            TransferTimeoutError: it was not in time; the connection is closed.
            RuntimeError: what ended it.
        """
        if not self._done.wait(limit.total_seconds()):
            self._transport.fail(TransferClosedError("a transfer timed out, which closes the connection"))
            raise TransferTimeoutError(f"no transfer for {limit.total_seconds():g} s")
        if self._error is not None:
            raise type(self._error)(str(self._error))


class MessageTransport(ABC):
    """One end of a connection. Tensors are contiguous and on the CPU, one a message."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: RuntimeError | None = None
        self._unrequested: dict[int, deque[Transfer]] = defaultdict(deque)
        self._requested: dict[int, int] = defaultdict(int)
        self._sendable: deque[Transfer] = deque()
        self._posted: dict[int, deque[Transfer]] = defaultdict(deque)
        self._control_frames = bytearray()
        self._is_held = False

    def send(self, tensor: Tensor, tag: int) -> Transfer:
        """Starts sending; raises RuntimeError where the connection is gone."""
        work = Transfer(self, tensor, tag)
        with self._lock:
            self._check_open()
            if self._requested[tag]:
                self._requested[tag] -= 1
                self._sendable.append(work)
                self._wake_unless_held()
            else:
                self._unrequested[tag].append(work)
        return work

    def recv(self, tensor: Tensor, tag: int) -> Transfer:
        """Starts receiving; raises RuntimeError where the connection is gone."""
        work = Transfer(self, tensor, tag)
        with self._lock:
            self._check_open()
            self._posted[tag].append(work)
            self._control_frames += FRAME.pack(_RECEIVE_READY, tag, 0)
            self._wake_unless_held()
        return work

    @contextmanager
    def together(self) -> Iterator[None]:
        """Holds what is started within it until its end: short messages leave in one system call, which wakes
        the other end once."""
        self._is_held = True
        try:
            yield
        finally:
            with self._lock:
                self._is_held = False
                if self._has_outgoing():
                    self._wake()

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
        self._interrupt()
        for work in ended:
            work.finish(self._error)

    def close(self) -> None:
        """Ends what is still under way, the threads and the connection. Idempotent."""
        self.fail(TransferClosedError("the connection is closed"))
        self._join()

    @abstractmethod
    def _wake(self) -> None:
        """Something can be sent, or the connection has failed. Called under the lock."""

    @abstractmethod
    def _interrupt(self) -> None:
        """The connection has failed: ends what blocks on it. Called without the lock."""

    @abstractmethod
    def _join(self) -> None:
        """Returns once all threads have ended and the socket is closed."""

    def _wake_unless_held(self) -> None:
        if not self._is_held:
            self._wake()

    def _check_open(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _has_outgoing(self) -> bool:
        """Whether anything can be sent now. Under the lock."""
        return bool(self._control_frames or self._sendable)

    def _next_bytes(self) -> int:
        """The payload's bytes of what is to be written next. Under the lock."""
        return self._sendable[0].nbytes if self._sendable else 0

    def _take_outgoing(self) -> tuple[bytearray, Transfer | None]:
        """Takes what is to be sent next, under the lock: the frames so far, and the message behind them."""
        head, self._control_frames = self._control_frames, bytearray()
        work = self._sendable.popleft() if self._sendable else None
        if work is not None:
            head += FRAME.pack(_PAYLOAD, work.tag, work.nbytes)
        return head, work

    def _take_frame(self, frame: memoryview) -> Transfer | None:
        """Takes a frame that has arrived whole; returns the receive whose payload follows, or None.

        Raises:
            UnexpectedFrameError: the other end may not send that.
        """
        kind, tag, nbytes = FRAME.unpack(frame)
        with self._lock:
            if kind == _RECEIVE_READY:
                if self._unrequested[tag]:
                    self._sendable.append(self._unrequested[tag].popleft())
                    self._wake()
                else:
                    self._requested[tag] += 1
                return None
            if kind != _PAYLOAD:
                raise UnexpectedFrameError(f"sent a frame of kind {kind}")
            if self._error is not None:
                return None
            if not self._posted[tag]:
                raise UnexpectedFrameError(f"sent a message of tag {tag} that nobody waits for")
            work = self._posted[tag].popleft()
        if work.nbytes != nbytes:
            fault = UnexpectedFrameError(f"sent {nbytes} bytes where {work.nbytes} are expected")
            work.finish(transfer_error(fault))
            raise fault
        return work


def transfer_error(exc: OSError) -> RuntimeError:
    """A socket's error as a transfer's."""
    if isinstance(exc, UnexpectedFrameError):
        return TransferFrameError(str(exc))
    if isinstance(exc, ConnectionResetError | BrokenPipeError | ConnectionRefusedError):
        return TransferClosedError(os_error_reason(exc))
    cls = TransferTimeoutError if isinstance(exc, TimeoutError) else RuntimeError
    return cls(os_error_reason(exc))
