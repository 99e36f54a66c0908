"""Messages between two ranks through TLS: what ``Pair`` uses of a Gloo group, over one encrypted connection.

As with Gloo a payload moves once its receiver is ready: posting a receive sends a word of that tag, and a
send waits for such a word. So every payload goes straight into the memory it is meant for, nothing is
buffered, and two ends that both send much never block each other.

A frame is a kind (one byte), a tag (32 bits), a length (64 bits) and, for data, the payload; little-endian.

One thread a pair reads and writes, since an OpenSSL connection is not for two at a time. A failure, a
time-out included, ends all that is under way and the connection, as with Gloo, and in Gloo's words, which
``Pair.lost`` knows.
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

from skyctl.transport.gate import words

Tensor = torch.Tensor

_FRAME = struct.Struct("<BIQ")
_READY, _DATA = 1, 2
_WRITE_BYTES = 256 << 10
"""Given to TLS at a time; it cuts that into records of 16 KiB."""
_TOGETHER_BYTES = 8 << 10
"""Payloads up to this go into one record with their frame."""
_TURN = 16
"""Reads, or writes, before it is the other's turn."""
_READ, _WRITE = select.POLLIN, select.POLLOUT


class _FaultError(ConnectionError):
    """The other end does not speak as it should."""


class TlsWork:
    """A transfer under way. Holds its tensor until it is let go itself."""

    __slots__ = ("_done", "_error", "_group", "_tensor", "nbytes", "tag")

    def __init__(self, group: TlsGroup, tensor: Tensor, tag: int) -> None:
        self._group, self._tensor, self.tag = group, tensor, tag
        self.nbytes = tensor.numel() * tensor.element_size()
        self._done = threading.Event()
        self._error: str | None = None

    def memory(self) -> memoryview:
        """The tensor's own bytes (without numpy, which a node may not have)."""
        if not self.nbytes:
            return memoryview(b"")
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self._tensor.data_ptr())).cast("B")

    def finish(self, error: str | None = None) -> None:
        """It is over."""
        self._error = error
        self._done.set()

    def wait(self, limit: timedelta) -> None:
        """Until it is over (RuntimeError, as Gloo's works)."""
        if not self._done.wait(limit.total_seconds()):
            self._group.fail("Application timeout caused pair closure")
            raise RuntimeError(f"Timed out waiting {limit.total_seconds():g} s for a transfer")
        if self._error is not None:
            raise RuntimeError(self._error)


class TlsGroup:
    """One end. Tensors are contiguous and on the CPU, one a message; ``close`` ends the thread.

    Args:
        sock: connected, its handshake done; this owns it from now on.
        peer: in the thread's name.
    """

    def __init__(self, sock: ssl.SSLSocket, peer: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self._error: str | None = None
        self._unasked: dict[int, deque[TlsWork]] = defaultdict(deque)
        self._asked: dict[int, int] = defaultdict(int)
        self._going: deque[TlsWork] = deque()
        self._posted: dict[int, deque[TlsWork]] = defaultdict(deque)
        self._words = bytearray()
        self._asleep = False
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        # the thread's own
        self._out: deque[memoryview] = deque()
        self._sending: TlsWork | None = None
        self._frame = memoryview(bytearray(_FRAME.size))
        self._into, self._filled = self._frame, 0
        self._receiving: TlsWork | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"tls with {peer}")
        self._thread.start()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> TlsWork:  # noqa: ARG002 — as Gloo's
        """Starts sending; raises RuntimeError where the connection is gone."""
        work = TlsWork(self, tensors[0], tag)
        with self._lock:
            self._need()
            if self._asked[tag]:
                self._asked[tag] -= 1
                self._going.append(work)
                self._ring()
            else:
                self._unasked[tag].append(work)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> TlsWork:  # noqa: ARG002 — as Gloo's
        """Starts receiving; raises RuntimeError where the connection is gone."""
        work = TlsWork(self, tensors[0], tag)
        with self._lock:
            self._need()
            self._posted[tag].append(work)
            self._words += _FRAME.pack(_READY, tag, 0)
            self._ring()
        return work

    def fail(self, error: str) -> None:
        """Ends everything under way with that error; the first one counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            queues = [self._going, *self._unasked.values(), *self._posted.values()]
            ended = [work for queue in queues for work in queue]
            for queue in queues:
                queue.clear()
            self._ring()
        for work in ended:
            work.finish(self._error)

    def close(self) -> None:
        """Ends what is still under way, the thread and the connection. Idempotent."""
        self.fail("Socket closed")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _need(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)

    def _ring(self) -> None:
        """Wakes the thread, under the lock."""
        if self._asleep:
            self._asleep = False
            with suppress(OSError):
                self._bell.send(b"\0")

    def _run(self) -> None:
        try:
            self._turns()
            error = "Socket closed"
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            error = "Connection closed by peer"
        except OSError as exc:
            error = words(exc)
        self.fail(error)
        for work in (self._sending, self._receiving):
            if work is not None:
                work.finish(self._error)
        for sock in (self._sock, self._bell, self._ear):
            sock.close()

    def _turns(self) -> None:
        """Until it has failed: reads and writes in turn, and sleeps when neither gets any further."""
        poll = select.poll()
        poll.register(self._sock, _READ)
        poll.register(self._ear, _READ)
        while self._error is None:
            wrote = self._write()
            if self._read() or wrote:
                continue
            with self._lock:
                if self._error is not None or (not self._out and (self._words or self._going)):
                    continue
                self._asleep = True
            poll.modify(self._sock, _READ | _WRITE if self._out else _READ)
            poll.poll()
            with self._lock:
                self._asleep = False
            with suppress(BlockingIOError):
                self._ear.recv(64)

    def _write(self) -> bool:
        """Whether anything went out."""
        moved = False
        for _ in range(_TURN):
            if not self._out and not self._next():
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

    def _next(self) -> bool:
        """Puts out what is to be written next: the words that have gathered, and one message."""
        with self._lock:
            head, self._words = self._words, bytearray()
            work = self._going.popleft() if self._going else None
        if work is not None:
            head += _FRAME.pack(_DATA, work.tag, work.nbytes)
            self._sending = work
            if work.nbytes <= _TOGETHER_BYTES:
                head += work.memory()
            else:
                self._out.append(work.memory())
        if head:
            self._out.appendleft(memoryview(head))
        return bool(head)

    def _read(self) -> bool:
        """Whether anything came in."""
        moved = False
        for _ in range(_TURN):
            try:
                got = self._sock.recv_into(self._into[self._filled :])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            if not got:
                raise ssl.SSLEOFError
            moved = True
            self._filled += got
            if self._filled == len(self._into):
                self._arrived()
        return moved

    def _arrived(self) -> None:
        """A frame is whole, or the payload that it has announced."""
        if self._receiving is not None:
            done, self._receiving = self._receiving, None
            self._into, self._filled = self._frame, 0
            done.finish()
            return
        kind, tag, nbytes = _FRAME.unpack(self._frame)
        self._filled = 0
        if kind == _READY:
            with self._lock:
                if self._unasked[tag]:
                    self._going.append(self._unasked[tag].popleft())
                else:
                    self._asked[tag] += 1
            return
        if kind != _DATA:
            raise _FaultError(f"the peer sent a frame of kind {kind}")
        with self._lock:
            if self._error is not None:
                return
            if not self._posted[tag]:
                raise _FaultError(f"the peer sent a message of tag {tag} that nobody waits for")
            work = self._posted[tag].popleft()
        self._receiving = work
        if work.nbytes != nbytes:
            raise _FaultError(f"the peer sent {nbytes} bytes where {work.nbytes} are expected")
        if nbytes:
            self._into = work.memory()
        else:
            self._receiving = None
            work.finish()
