"""Messages between two ranks over a connected socket, as it is: what ``PeerConnection`` uses in the clear.

Two threads a connection, one that writes and one that reads. Each blocks in the kernel for a whole message at
a time, so Python and its lock cost the same for a message of a kilobyte and of a gigabyte.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from skyctl.transport.message_transport import FRAME, MessageTransport, Transfer, transfer_error

_WAKE_BYTES = 1 << 15
"""Of a payload the reader is woken once so many bytes are there, or all, not for every packet."""
_PACKETS_BYTES = 1 << 13
"""Shorter payloads are a few packets: not worth two system calls."""
_INLINE_BYTES = (1 << 15) + 64
"""Messages up to this together are sent by whoever finds that they can be: 32 KiB and a header."""
_READ_AHEAD_BYTES = 1 << 14
"""Read at once where a frame or a short payload is to come: mostly all there is, in one system call."""
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")
"""``sendmsg`` takes no more at a time; a message is two of them, its frame and its payload."""


class SocketTransport(MessageTransport):
    """One end.

    Args:
        sock: connected and authenticated; this owns it from now on.
        peer: in the threads' names.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        super().__init__()
        sock.setblocking(True)
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._changed = threading.Condition(self._lock)
        self._is_writing = False
        self._left: list[memoryview] = []
        self._sending: list[Transfer] = []
        self._buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._ahead = self._buffer[:0]
        self._receiving: Transfer | None = None
        self._threads = [
            threading.Thread(target=self._until_failed, args=(move,), daemon=True, name=f"{what} {peer}")
            for move, what in ((self._write, "sends to"), (self._read, "receives from"))
        ]
        for thread in self._threads:
            thread.start()

    def _wake(self) -> None:
        """Sends at once what is short, where nobody writes; the writer does the rest."""
        while self._may_write_here():
            self._take_next()
            with suppress(OSError):  # its buffer is full, or the writer will meet the error
                self._drop_sent(self._sock.sendmsg(self._left, (), socket.MSG_DONTWAIT))
            if self._left:
                break
            self._finish_sending()
        self._changed.notify()

    def _may_write_here(self) -> bool:
        busy = self._is_writing or self._left or self._error is not None
        return not busy and self._has_outgoing() and self._next_bytes() <= _INLINE_BYTES

    def _interrupt(self) -> None:
        with suppress(OSError):  # it is closed already
            self._sock.shutdown(socket.SHUT_RDWR)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._sock.close()

    def _until_failed(self, move: Callable[[], None]) -> None:
        while self._error is None:
            try:
                move()
            except OSError as exc:
                self.fail(transfer_error(exc))
        cut_off = self._sending if move == self._write else [self._receiving]
        for transfer in cut_off:
            if transfer is not None:
                transfer.finish(self._error)

    def _write(self) -> None:
        """Writes what is left, or what can be sent next; waits where there is nothing."""
        with self._changed:
            self._is_writing = bool(self._left or self._has_outgoing())
            if not self._is_writing:
                if self._error is None:
                    self._changed.wait()
                return
            if not self._left:
                self._take_next()
        while self._left:
            self._drop_sent(self._sock.sendmsg(self._left))
        self._finish_sending()

    def _take_next(self) -> None:
        """Takes what is to be written in one system call: one message, or several that are short together."""
        inline_bytes = 0
        while self._has_outgoing() and (
            not self._left
            or (inline_bytes + self._next_bytes() <= _INLINE_BYTES and len(self._left) + 2 <= _MOST_BUFFERS)
        ):
            head, message = self._take_outgoing()
            self._left.append(memoryview(head))
            if message is None:
                return
            self._sending.append(message)
            if message.nbytes:
                self._left.append(message.memory())
            inline_bytes += message.nbytes

    def _drop_sent(self, sent: int) -> None:
        while self._left and sent >= len(self._left[0]):
            sent -= len(self._left.pop(0))
        if self._left:
            self._left[0] = self._left[0][sent:]

    def _finish_sending(self) -> None:
        done, self._sending = self._sending, []
        for transfer in done:
            transfer.finish()

    def _read(self) -> None:
        """Reads one frame, and the payload that it announces."""
        frame = memoryview(bytearray(FRAME.size))
        self._fill(frame)
        self._receiving = self._take_frame(frame)
        if self._receiving is None:
            return
        payload = self._read_ahead(self._receiving.memory())
        if len(payload) >= _PACKETS_BYTES:
            wake_bytes = min(len(payload), _WAKE_BYTES)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._receive_all(payload[:-wake_bytes])  # behind every byte of it at least so many come
            self._readable.poll()  # now exactly so many are left
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._receive_all(payload[-wake_bytes:])
        else:
            self._fill(payload)
        done, self._receiving = self._receiving, None
        done.finish()

    def _fill(self, view: memoryview) -> None:
        """Fills what is short, reading on as far as there is anything."""
        while view := self._read_ahead(view):
            got = self._sock.recv_into(self._buffer)
            if not got:
                raise ConnectionResetError("the peer has closed the connection")
            self._ahead = self._buffer[:got]

    def _read_ahead(self, view: memoryview) -> memoryview:
        """Takes what was read already; what of the view is still to be filled."""
        count = min(len(view), len(self._ahead))
        if count:  # the memory of an empty tensor can't be written to
            view[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
        return view[count:]

    def _receive_all(self, view: memoryview) -> None:
        while view:
            got = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionResetError("the peer has closed the connection")
            view = view[got:]
