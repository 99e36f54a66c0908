"""Who may join: the two ends of a connection prove to each other that they know one secret. No torch.

::

    connector → listener    magic, a fresh nonce
    listener → connector    a fresh nonce, HMAC-SHA256(secret, purpose, "listener", both nonces)
    connector → listener    HMAC-SHA256(secret, purpose, "connector", both nonces)
    listener → connector    welcome

The secret itself never crosses the wire, and a proof serves for these two nonces, this purpose and this role
alone. Before the listener has the connector's proof it reads nothing else, and nobody else is told anything.
Strangers are dropped one by one, with a line each; of those that stall only so many are kept, and the oldest
goes first, so that they can't keep the true peer out.

Whoever can change what passes on the wire can take over a connection after its proof: against that there is
only TLS (``identity``).
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

MAGIC = b"skyctl\0\1"
NONCE_BYTES = PROOF_BYTES = 32
WELCOME = b"\1"
BACKLOG = 128
MOST_STRANGERS = 16
STRANGER_S = 10.0
"""For a connector's part of the proof."""
MOST_TOLD = 20
"""Strangers that get a line each; a flood of them must not fill the log."""
_RETRY_S = 0.1
_TICK_S = 1.0

Tell = Callable[[str], None]


class ImpostorError(ConnectionError):
    """What answers there does not know the secret."""


@dataclass(frozen=True)
class Admitted:
    """A connection whose other end has proved itself. ``key``: known to these two alone, fresh each time."""

    sock: socket.socket
    key: bytes = field(repr=False)


def tell_stderr(line: str) -> None:
    """One line on the process's own output, which the launcher keeps in its log."""
    print(line, file=sys.stderr, flush=True)


def listening(address: str) -> socket.socket:
    """A socket that listens on a free port of that address, and of no other.

    Raises:
        OSError: the address is not this machine's.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def enter(host: str, port: int, secret: str, *, purpose: str, timeout_s: float) -> Admitted:
    """Connects to a gate and proves the secret; tries again while nobody listens or the line breaks.

    Raises:
        ImpostorError: something else listens there.
        OSError: no connection within ``timeout_s``; TimeoutError says why where that is known.
    """
    deadline = time.monotonic() + timeout_s
    reason = "no answer"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((host, port), left_s)
        except socket.gaierror:
            raise
        except OSError as exc:
            reason = words(exc)
        else:
            try:
                return prove(sock, secret, purpose=purpose, timeout_s=max(0.01, deadline - time.monotonic()))
            except ImpostorError:
                sock.close()
                raise
            except OSError as exc:
                sock.close()
                reason = words(exc)
            except BaseException:
                sock.close()
                raise
        time.sleep(max(0.0, min(_RETRY_S, deadline - time.monotonic())))
    raise TimeoutError(reason)


def prove(sock: socket.socket, secret: str, *, purpose: str, timeout_s: float) -> Admitted:
    """The connector's side, on a connected socket. It is left blocking, and open where this raises.

    Raises:
        ImpostorError: the other end's proof is wrong.
        OSError: the line broke, or the other end was silent for ``timeout_s``.
    """
    if sock.getsockname() == sock.getpeername():
        raise ConnectionError("the port is free, and was connected to itself")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(timeout_s)
    mine = os.urandom(NONCE_BYTES)
    sock.sendall(MAGIC + mine)
    nonces = mine + exactly(sock, NONCE_BYTES)
    theirs = exactly(sock, PROOF_BYTES)
    if not hmac.compare_digest(theirs, _proof(secret, purpose, "listener", nonces)):
        raise ImpostorError("what answers there does not know the secret")
    sock.sendall(_proof(secret, purpose, "connector", nonces))
    if exactly(sock, len(WELCOME)) != WELCOME:
        raise ImpostorError("what answers there does not speak as it should")
    sock.settimeout(None)
    return Admitted(sock, _proof(secret, purpose, "key", nonces))


class Gate:
    """The listening side, on a socket of its own or on one given. ``admit`` in one thread; ``close`` in any.

    Args:
        sock: listens already (``listening``); this owns it from now on.
        purpose: what the connection is for; both ends must say the same.
        most: how many connections may be without a proof at a time.
        tell: gets a line for each stranger.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: str,
        *,
        purpose: str,
        most: int = MOST_STRANGERS,
        stranger_s: float = STRANGER_S,
        tell: Tell = tell_stderr,
    ) -> None:
        if not secret:
            raise ValueError("a gate needs a secret")
        self._secret, self._purpose = secret, purpose
        self._most, self._stranger_s, self._tell = most, stranger_s, tell
        self.refused = 0
        self._sock = sock
        sock.setblocking(False)
        self.address, self.port = sock.getsockname()[:2]
        self._callers: list[_Caller] = []
        self._closed = False
        self._admitting = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def admit(self, timeout_s: float) -> Admitted:
        """The next connection that has proved the secret, as a blocking socket.

        Raises:
            TimeoutError: none came.
            ConnectionAbortedError: the gate was closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._admitting:
            while not self._closed and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in self._selector.select(min(left_s, _TICK_S)):
                    if key.data is None:
                        self._accept()
                    elif key.data in self._callers and (done := self._hear(key.data)) is not None:
                        return done
                self._expire()
        if self._closed:
            self._dispose()
            raise ConnectionAbortedError("the gate was closed")
        strangers = f"; {self.refused} that did not know the secret were refused" if self.refused else ""
        raise TimeoutError(f"nobody came{strangers}")

    def close(self) -> None:
        """Listens no more; those without a proof are cut off, those admitted stay. Idempotent."""
        self._closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes who waits in admit
        if self._admitting.acquire(blocking=False):
            try:
                self._dispose()
            finally:
                self._admitting.release()

    def _dispose(self) -> None:
        for caller in self._callers:
            caller.sock.close()
        self._callers.clear()
        self._selector.close()
        self._sock.close()

    def _accept(self) -> None:
        try:
            sock, where = self._sock.accept()
        except OSError:  # it was gone before we looked; or the gate is closed
            return
        while len(self._callers) >= self._most:
            self._refuse(self._callers[0], "it was the oldest of too many that had proved nothing")
        sock.setblocking(False)
        caller = _Caller(sock, f"{where[0]}:{where[1]}", time.monotonic() + self._stranger_s)
        self._callers.append(caller)
        self._selector.register(sock, selectors.EVENT_READ, caller)

    def _hear(self, caller: _Caller) -> Admitted | None:
        """Its next bytes, never more than are its turn to say."""
        wanted = PROOF_BYTES if caller.nonces else len(MAGIC) + NONCE_BYTES
        try:
            data = caller.sock.recv(wanted - len(caller.heard))
            caller.heard += data
            if not data:
                self._refuse(caller, "it left without a proof")
            elif not caller.nonces and not (caller.heard.startswith(MAGIC) or MAGIC.startswith(caller.heard)):
                self._refuse(caller, "it speaks something else")
            elif len(caller.heard) == wanted:
                return self._answer(caller)
        except BlockingIOError:
            pass
        except OSError as exc:
            self._refuse(caller, words(exc))
        return None

    def _answer(self, caller: _Caller) -> Admitted | None:
        if not caller.nonces:
            caller.nonces = bytes(caller.heard[len(MAGIC) :]) + os.urandom(NONCE_BYTES)
            caller.heard.clear()
            proof = _proof(self._secret, self._purpose, "listener", caller.nonces)
            caller.sock.send(caller.nonces[NONCE_BYTES:] + proof)  # fits any socket's buffer
            return None
        expected = _proof(self._secret, self._purpose, "connector", caller.nonces)
        if not hmac.compare_digest(caller.heard, expected):
            self._refuse(caller, "its proof is wrong")
            return None
        caller.sock.send(WELCOME)
        self._callers.remove(caller)
        self._selector.unregister(caller.sock)
        caller.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller.sock.setblocking(True)
        return Admitted(caller.sock, _proof(self._secret, self._purpose, "key", caller.nonces))

    def _expire(self) -> None:
        now = time.monotonic()
        for caller in [caller for caller in self._callers if caller.deadline <= now]:
            self._refuse(caller, f"no proof within {self._stranger_s:.0f} s")

    def _refuse(self, caller: _Caller, why: str) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.sock)
        caller.sock.close()
        self.refused += 1
        if self.refused <= MOST_TOLD:
            more = "; further ones are not told" if self.refused == MOST_TOLD else ""
            self._tell(f"refused a stranger, {caller.where} on {self.address}:{self.port}: {why}{more}")


@dataclass(eq=False)
class _Caller:
    """A connection that has proved nothing yet. ``nonces``: both, once it has said its own."""

    sock: socket.socket
    where: str
    deadline: float
    heard: bytearray = field(default_factory=bytearray)
    nonces: bytes = b""


def exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes. Raises OSError where the line ends before."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return data


def words(exc: OSError) -> str:
    """The system's reason without its number."""
    return exc.strerror or str(exc) or type(exc).__name__


def _proof(secret: str, purpose: str, role: str, nonces: bytes) -> bytes:
    said = b"\0".join((b"skyctl", purpose.encode(), role.encode(), nonces))
    return hmac.digest(secret.encode(), said, "sha256")
