"""Messages between two ranks through TLS: what ``PeerConnection`` uses where a run is encrypted.

One thread a connection reads and writes in turn, since an OpenSSL connection is not for two at a time.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections import deque
from contextlib import suppress

from skyctl.transport.message_transport import FRAME, MessageTransport, Transfer, transfer_error
from skyctl.transport.transfer_errors import TransferClosedError

_WRITE_BYTES = 256 << 10
"""Given to TLS at a time; it cuts that into records of 16 KiB."""
_INLINE_PAYLOAD_BYTES = 8 << 10
"""Payloads up to this go into one record with their frame."""
_TURNS_BEFORE_SWITCH = 16
"""Reads, or writes, before it is the other's turn."""
_RECORD_BYTES = 1 << 14
"""The most that one record carries, and so what TLS may hold of a record that has not arrived whole."""
_WAKE_BYTES = 1 << 15
"""Of a payload the thread is woken once so many bytes are there, or all, not for every packet."""
_READ, _WRITE = select.POLLIN, select.POLLOUT


class TlsTransport(MessageTransport):
    """One end.

    Args:
        sock: connected, its handshake done; this owns it from now on.
        peer: in the thread's name.
    """

    def __init__(self, sock: ssl.SSLSocket, peer: str) -> None:
        super().__init__()
        sock.setblocking(False)
        self._sock = sock
        self._is_waiting = False
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        # the thread's own
        self._out: deque[memoryview] = deque()
        self._sending: Transfer | None = None
        self._frame = memoryview(bytearray(FRAME.size))
        self._into, self._filled = self._frame, 0
        self._receiving: Transfer | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"tls with {peer}")
        self._thread.start()

    def _wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            with suppress(OSError):
                self._wake_sender.send(b"\0")

    def _interrupt(self) -> None:
        """Nothing: its thread waits in ``poll`` alone, and ``_wake`` ends that."""

    def _join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._transfer_until_failed()
            error: RuntimeError = TransferClosedError("the connection is closed")
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            error = TransferClosedError("the peer has closed the connection")
        except OSError as exc:
            error = transfer_error(exc)
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
        wake_bytes = 1
        while self._error is None:
            wrote = self._write()
            if self._read() or wrote:
                continue
            with self._lock:
                if self._error is not None or (not self._out and self._has_outgoing()):
                    continue
                self._is_waiting = True
            if wake_bytes != self._wake_bytes():
                wake_bytes = self._wake_bytes()
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            poll.modify(self._sock, _READ | _WRITE if self._out else _READ)
            poll.poll()
            with self._lock:
                self._is_waiting = False
            with suppress(BlockingIOError):
                self._wake_receiver.recv(64)

    def _wake_bytes(self) -> int:
        """How many bytes wake the thread: never more than are sure to come still.

        A payload takes at least as many bytes as it has, less those of a record whose beginning TLS holds.
        The end of the connection always wakes the thread, and it follows every alert.
        """
        return min(max(1, len(self._into) - self._filled - _RECORD_BYTES), _WAKE_BYTES)

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
        """Queues what is to be written next; whether there is anything."""
        with self._lock:
            head, work = self._take_outgoing()
        if work is not None:
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
        if self._receiving is None:
            self._receiving = self._take_frame(self._frame)
            if self._receiving is not None and self._receiving.nbytes:
                self._into, self._filled = self._receiving.memory(), 0
                return
        self._into, self._filled = self._frame, 0
        if self._receiving is not None:
            done, self._receiving = self._receiving, None
            done.finish()
