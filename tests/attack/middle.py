"""Somebody on the path between two ranks: passes on what they say, changed, cut, delayed or crossed."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from skyctl.transport.handshake import HELLO_BYTES, NONCE_BYTES, PROOF_BYTES, WELCOME, recv_exactly

HERE = "127.0.0.1"
PATIENCE_S = 30.0
PROVED_BYTES = (HELLO_BYTES + PROOF_BYTES, NONCE_BYTES + PROOF_BYTES + len(WELCOME))
"""The numbers of bytes that connector and listener have sent when their proofs are over."""

Alter = Callable[[bool, int, bytes], bytes]
"""(towards the listener?, bytes passed on before, the next bytes) → what is passed on. ``Cut`` ends it."""


Alterations = Callable[[int], Alter]
"""One of the following, at that byte of what the connector says."""


class Cut(Exception):  # noqa: N818 - not an error
    """The connection is cut behind those bytes."""


class Middle:
    """Listens in a rank's place; ``address`` is what its peer is to be told."""

    def __init__(self, alter: Alter = lambda _towards, _before, data: data) -> None:
        self._alter = alter
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = False

    def between(self, host: str, port: int, *, next_to: bool = False) -> tuple[str, int]:
        """A port that leads to that one.

        Args:
            next_to: it is the next free one in the order by which Gloo decides which of two ranks connects.
        """
        door = _next_free(port) if next_to else socket.create_server((HERE, 0))
        self._sockets.append(door)
        self._start(self._serve, door, (host, port))
        return HERE, int(door.getsockname()[1])

    def close(self) -> None:
        """Closes everything; idempotent."""
        self._closed = True
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for sock in self._sockets:
            sock.close()

    def _start(self, act: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=act, args=args, daemon=True))
        self._threads[-1].start()

    def _serve(self, door: socket.socket, target: tuple[str, int]) -> None:
        with suppress(OSError):
            while not self._closed:
                near, _ = door.accept()
                self._sockets.append(near)
                far = socket.create_connection(target, PATIENCE_S)
                far.settimeout(None)
                self._sockets.append(far)
                self._joined(near, far)

    def _joined(self, near: socket.socket, far: socket.socket) -> None:
        self._pass_on(near, far, near, far)

    def _pass_on(self, a: socket.socket, b: socket.socket, c: socket.socket, d: socket.socket) -> None:
        """Starts to pass on a's bytes to b, and d's to c."""
        self._start(self._pump, a, b, True)
        self._start(self._pump, d, c, False)

    def _pump(self, source: socket.socket, target: socket.socket, towards: bool) -> None:
        before = 0
        try:
            while data := source.recv(65536):
                target.sendall(self._alter(towards, before, data))
                before += len(data)
        except Cut as cut:
            with suppress(OSError):
                target.sendall(cut.args[0])
        except OSError:
            pass
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _next_free(port: int) -> socket.socket:
    """In Gloo's order of ports, that of their bytes as the network has them, read the other way round."""
    for other in (*range(port + 256, 1 << 16, 256), *range(port - 256, 1 << 14, -256)):
        with suppress(OSError):
            return socket.create_server((HERE, other))
    raise OSError(f"no port is free next to {port}")


class Crossing(Middle):
    """Lets two pairs prove themselves, and then joins the one's connector to the other's listener."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()

    def _joined(self, near: socket.socket, far: socket.socket) -> None:
        far.sendall(recv_exactly(near, HELLO_BYTES))
        near.sendall(recv_exactly(far, NONCE_BYTES + PROOF_BYTES))
        far.sendall(recv_exactly(near, PROOF_BYTES))
        near.sendall(recv_exactly(far, len(WELCOME)))
        with self._lock:
            self._waiting.append((near, far))
            if len(self._waiting) < 2:
                return
            (a_near, a_far), (b_near, b_far) = self._waiting
            self._waiting.clear()
        self._pass_on(a_near, b_far, a_near, b_far)
        self._pass_on(b_near, a_far, b_near, a_far)


def delaying(seed: int, most_s: float = 0.02) -> Alter:
    """Holds what it passes on for up to that long."""
    chance = random.Random(seed)

    def alter(_towards: bool, _before: int, data: bytes) -> bytes:
        time.sleep(chance.random() * most_s)
        return data

    return alter


def cutting(after: int) -> Alter:
    """Cuts the connection once the connector has said so many bytes."""

    def alter(towards: bool, before: int, data: bytes) -> bytes:
        if towards and before + len(data) > after:
            raise Cut(data[: after - before])
        return data

    return alter


def flipping(after: int) -> Alter:
    """Changes one bit of what the connector says, at that byte."""

    def alter(towards: bool, before: int, data: bytes) -> bytes:
        at = after - before
        if not towards or not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return alter


def dropping(after: int, size: int = 64) -> Alter:
    """Leaves so many bytes out."""

    def alter(towards: bool, before: int, data: bytes) -> bytes:
        at = after - before
        return data[:at] + data[at + size :] if towards and 0 <= at < len(data) else data

    return alter


def replaying(after: int) -> Alter:
    """Says what has been said once more."""
    heard = bytearray()

    def alter(towards: bool, before: int, data: bytes) -> bytes:
        if not towards:
            return data
        heard.extend(data)
        at = after - before
        return data + bytes(heard[PROVED_BYTES[0] : after]) if 0 <= at < len(data) else data

    return alter
