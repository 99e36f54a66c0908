"""Admission to a connection: its two ends prove to each other that they know one secret. No torch.

::

    connector → listener    magic, a fresh nonce, HMAC-SHA256(secret, purpose, "hello", nonce)
    listener → connector    a fresh nonce, HMAC-SHA256(secret, purpose, "listener", both nonces)
    connector → listener    HMAC-SHA256(secret, purpose, "connector", both nonces)
    listener → connector    welcome

The secret itself never crosses the wire, and a proof serves for these two nonces, this purpose and this role
alone. Before the listener has the connector's proof it reads nothing else, and it tells nothing to anybody
else: not even its nonce to somebody whose hello is wrong or was seen before.

Strangers are refused one by one. Of those that stall only so many are kept, in all and of one address; then
the oldest goes that has not said hello. The right peer says it with its first packet, so a crowd of them does
not keep it out, however far away it is.

Anybody who can change what passes on the wire can take over a connection after its proof. Against that there
is only TLS (``tls_identity``), which is bound to the proof.
"""

from __future__ import annotations

import errno
import hmac
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from skyctl.transport.congestion_control import suit_round_trip

MAGIC = b"skyctl\0\2"
NONCE_BYTES = PROOF_BYTES = 32
WELCOME = b"\1"
LISTEN_BACKLOG = 128
HELLO_BYTES = len(MAGIC) + NONCE_BYTES + PROOF_BYTES
MAX_STRANGERS = 256
"""Connections at a time that have not said hello."""
MAX_STRANGERS_PER_ADDRESS = 64
HANDSHAKE_TIMEOUT_S = 10.0
"""For a connector's half of the handshake."""
MAX_LOGGED_REFUSALS = 20
"""Refused peers that get a log line each; a flood of them must not fill the log."""
_NO_ANSWER = bytes(NONCE_BYTES + PROOF_BYTES)
"""No proof of anything: from it a peer of another run learns at once that it is at the wrong door."""
_RETRY_INTERVAL_S = 0.1
_EXPIRY_INTERVAL_S = 1.0

LogLine = Callable[[str], None]


class AuthenticationError(ConnectionError):
    """The process that answers there does not know the run's secret."""


@dataclass(frozen=True)
class Caller:
    """The other end that is let in: it knows the secret, and comes for that purpose."""

    secret: str = field(repr=False)
    purpose: str


@dataclass(frozen=True)
class AuthenticatedSocket:
    """A connection whose other end knows the secret.

    Attributes:
        key: known to these two alone, fresh each time.
        caller: of those that a listener expects, the number of the one that came.
    """

    sock: socket.socket
    key: bytes = field(repr=False)
    caller: int = 0


class ConnectionAttempt:
    """A connection that is being set up, for another thread to end. It may fail before ``end`` returns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self.is_ended = False

    def watch(self, sock: socket.socket) -> None:
        """From now on ``end`` ends what blocks on that socket, even after TLS has taken it over.

        Raises:
            ConnectionAbortedError: it has ended already.
        """
        with self._lock:
            self._forget()
            if self.is_ended:
                raise ConnectionAbortedError("it was closed here")
            self._sock = sock.dup()

    def forget(self) -> None:
        """The socket is somebody else's to end: the attempt is over, or has come to a connection."""
        with self._lock:
            self._forget()

    def end(self) -> None:
        """Ends the attempt at once. Idempotent."""
        with self._lock:
            self.is_ended = True
            if self._sock is not None:
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._forget()

    def _forget(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None


def log_to_stderr(line: str) -> None:
    """One line on the process's own output, which the launcher keeps in its log."""
    print(line, file=sys.stderr, flush=True)


def open_listener(address: str) -> socket.socket:
    """A socket that listens on a free port of that address, and of no other.

    Raises:
        OSError: the address is not this machine's.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(LISTEN_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def connect_authenticated(
    host: str,
    port: int,
    secret: str,
    *,
    purpose: str,
    timeout_s: float,
    is_patient: bool = False,
    attempt: ConnectionAttempt | None = None,
) -> AuthenticatedSocket:
    """Connects to a listener and authenticates; tries again while nobody listens or the connection breaks.

    Args:
        is_patient: try again, too, where the listener does not expect this secret and purpose: not yet.
        attempt: another thread may end it.

    Raises:
        AuthenticationError: something else listens there.
        ConnectionAbortedError: the attempt was ended.
        OSError: no connection within ``timeout_s``; TimeoutError says why where that is known.
    """
    attempt = attempt or ConnectionAttempt()
    deadline = time.monotonic() + timeout_s
    reason: str | None = None
    while (left_s := deadline - time.monotonic()) > 0:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            attempt.watch(sock)
            sock.settimeout(left_s)
            sock.connect((host, port))
            return authenticate(
                sock, secret, purpose=purpose, timeout_s=max(0.01, deadline - time.monotonic())
            )
        except OSError as exc:
            sock.close()
            is_final = isinstance(exc, AuthenticationError) and not is_patient
            if is_final or attempt.is_ended or isinstance(exc, socket.gaierror):
                raise
            if reason is None or not isinstance(exc, TimeoutError):  # the last attempt may have had no time
                reason = os_error_reason(exc)
        except BaseException:
            sock.close()
            raise
        finally:
            attempt.forget()
        time.sleep(max(0.0, min(_RETRY_INTERVAL_S, deadline - time.monotonic())))
    raise TimeoutError(reason or "no answer")


def authenticate(sock: socket.socket, secret: str, *, purpose: str, timeout_s: float) -> AuthenticatedSocket:
    """The connector's side, on a connected socket. It is left blocking, and open where this raises.

    Raises:
        AuthenticationError: the other end's proof is wrong.
        OSError: the connection broke, or the other end was silent for ``timeout_s``.
    """
    if sock.getsockname() == sock.getpeername():
        raise ConnectionError("the port is free, and was connected to itself")
    caller = Caller(secret, purpose)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(timeout_s)
    mine = os.urandom(NONCE_BYTES)
    sock.sendall(MAGIC + mine + _make_proof(caller, "hello", mine))
    nonces = mine + recv_exactly(sock, NONCE_BYTES)
    theirs = recv_exactly(sock, PROOF_BYTES)
    if not hmac.compare_digest(theirs, _make_proof(caller, "listener", nonces)):
        raise AuthenticationError("what answers there does not know the secret")
    sock.sendall(_make_proof(caller, "connector", nonces))
    if recv_exactly(sock, len(WELCOME)) != WELCOME:
        raise AuthenticationError("what answers there does not speak as it should")
    sock.settimeout(None)
    suit_round_trip(sock)
    return AuthenticatedSocket(sock, _make_proof(caller, "key", nonces))


class AuthenticatingListener:
    """The listening side. ``accept`` in one thread; ``close`` in any.

    Args:
        sock: listens already (``open_listener``); this owns it from now on.
        purpose: what the connection is for; both ends must say the same.
        handshake_timeout_s: how long each connection may take to authenticate itself.
        log: gets a line for each one that is refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: str,
        *,
        purpose: str,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        log: LogLine = log_to_stderr,
    ) -> None:
        if not secret:
            raise ValueError("a listener needs a secret")
        self._callers = {0: Caller(secret, purpose)}
        self._handshake_timeout_s, self._log = handshake_timeout_s, log
        self.refused_count = 0
        self._sock = sock
        sock.setblocking(False)
        self.address, self.port = sock.getsockname()[:2]
        self._pending: list[_UnauthenticatedPeer] = []
        self._hellos: set[bytes] = set()  # their nonces
        self._closed = False
        self._accepting = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def expect(self, callers: Mapping[int, Caller]) -> None:
        """From now on these are let in, and nobody else; with none, all that have begun are refused.

        Refusals are counted, and logged, anew where others are expected than before.
        """
        with self._accepting:
            if not callers.items() <= self._callers.items():
                self.refused_count = 0
                self._hellos.clear()  # they can't be said again for another purpose
            self._callers = dict(callers)
            for peer in list(self._pending):
                if not callers or (peer.nonces and callers.get(peer.number) != peer.caller):
                    self._refuse(peer, "it is not expected any more")

    def accept(self, timeout_s: float) -> AuthenticatedSocket:
        """The next connection that has authenticated itself, as a blocking socket.

        Raises:
            TimeoutError: there was none.
            ConnectionAbortedError: the listener was closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._accepting:
            while not self._closed and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in self._selector.select(min(left_s, _EXPIRY_INTERVAL_S)):
                    if key.data is None:
                        self._accept_pending()
                    elif key.data in self._pending and (done := self._read_from(key.data)) is not None:
                        return done
                self._expire()
        if self._closed:
            self._dispose()
            raise ConnectionAbortedError("the listener was closed")
        refused = (
            f"; {self.refused_count} that did not know the secret were refused" if self.refused_count else ""
        )
        raise TimeoutError(f"nobody came{refused}")

    def close(self) -> None:
        """Stops listening; pending connections are closed, accepted ones stay open. Idempotent."""
        self._closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in accept
        if self._accepting.acquire(blocking=False):
            try:
                self._dispose()
            finally:
                self._accepting.release()

    def _dispose(self) -> None:
        for peer in self._pending:
            peer.sock.close()
        self._pending.clear()
        self._selector.close()
        self._sock.close()

    def _accept_pending(self) -> None:
        try:
            sock, where = self._sock.accept()
        except OSError as exc:  # it was gone already, or the listener is closed
            strangers = self._strangers()
            if exc.errno in (errno.EMFILE, errno.ENFILE) and strangers:
                self._refuse(strangers[0], "it was the oldest stranger when no file descriptor was left")
            else:
                time.sleep(_RETRY_INTERVAL_S)
            return
        strangers = self._strangers()
        same = [peer for peer in strangers if peer.address == where[0]]
        if len(same) >= MAX_STRANGERS_PER_ADDRESS:
            self._refuse(same[0], "it was the oldest of too many from its address that had not said hello")
        elif len(strangers) >= MAX_STRANGERS:
            self._refuse(strangers[0], "it was the oldest of too many that had not said hello")
        sock.setblocking(False)
        peer = _UnauthenticatedPeer(sock, where[0], where[1], time.monotonic() + self._handshake_timeout_s)
        self._pending.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _strangers(self) -> list[_UnauthenticatedPeer]:
        """Those that have not said hello, oldest first."""
        return [peer for peer in self._pending if not peer.nonces]

    def _read_from(self, peer: _UnauthenticatedPeer) -> AuthenticatedSocket | None:
        """Its next bytes, never more than the handshake expects now."""
        wanted = PROOF_BYTES if peer.nonces else HELLO_BYTES
        try:
            data = peer.sock.recv(wanted - len(peer.received))
            peer.received += data
            if not data:
                self._refuse(peer, "it closed the connection without a proof")
            elif not peer.nonces and not (peer.received.startswith(MAGIC) or MAGIC.startswith(peer.received)):
                self._refuse(peer, "it speaks something else")
            elif len(peer.received) == wanted:
                if peer.nonces:
                    return self._check_proof(peer)
                self._answer_hello(peer)
        except BlockingIOError:
            pass
        except OSError as exc:
            self._refuse(peer, os_error_reason(exc))
        return None

    def _answer_hello(self, peer: _UnauthenticatedPeer) -> None:
        theirs = bytes(peer.received[len(MAGIC) : len(MAGIC) + NONCE_BYTES])
        for number, caller in self._callers.items():
            if hmac.compare_digest(peer.received[-PROOF_BYTES:], _make_proof(caller, "hello", theirs)):
                peer.number, peer.caller = number, caller
        if peer.caller is None:
            peer.sock.send(_NO_ANSWER)
            self._refuse(peer, "it does not know the secret, or comes for something else")
        elif theirs in self._hellos:
            self._refuse(peer, "its hello was another's before")
        else:
            self._hellos.add(theirs)
            peer.nonces = theirs + os.urandom(NONCE_BYTES)
            peer.received.clear()
            proof = _make_proof(peer.caller, "listener", peer.nonces)
            peer.sock.send(peer.nonces[NONCE_BYTES:] + proof)  # fits any socket's buffer

    def _check_proof(self, peer: _UnauthenticatedPeer) -> AuthenticatedSocket | None:
        assert peer.caller is not None
        if not hmac.compare_digest(peer.received, _make_proof(peer.caller, "connector", peer.nonces)):
            self._refuse(peer, "its proof is wrong")
            return None
        peer.sock.send(WELCOME)
        self._pending.remove(peer)
        self._selector.unregister(peer.sock)
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sock.setblocking(True)
        suit_round_trip(peer.sock)
        return AuthenticatedSocket(peer.sock, _make_proof(peer.caller, "key", peer.nonces), peer.number)

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._pending if peer.deadline <= now]:
            self._refuse(peer, f"no proof within {self._handshake_timeout_s:.0f} s")

    def _refuse(self, peer: _UnauthenticatedPeer, why: str) -> None:
        self._pending.remove(peer)
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self.refused_count += 1
        if self.refused_count <= MAX_LOGGED_REFUSALS:
            more = "; further ones are not logged" if self.refused_count == MAX_LOGGED_REFUSALS else ""
            where = f"{peer.address}:{peer.port} on {self.address}:{self.port}"
            self._log(f"refused an unauthenticated peer, {where}: {why}{more}")


@dataclass(eq=False)
class _UnauthenticatedPeer:
    """A connection in the middle of its handshake.

    Attributes:
        nonces: both, once it has said hello.
        number, caller: as whom it has.
    """

    sock: socket.socket
    address: str
    port: int
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    nonces: bytes = b""
    number: int = 0
    caller: Caller | None = None


def recv_exactly(sock: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. Raises OSError where the connection ends before."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return data


def os_error_reason(exc: OSError) -> str:
    """The system's reason without its error number."""
    return exc.strerror or str(exc) or type(exc).__name__


def _make_proof(caller: Caller, role: str, nonces: bytes) -> bytes:
    message = b"\0".join((b"skyctl", caller.purpose.encode(), role.encode(), nonces))
    return hmac.digest(caller.secret.encode(), message, "sha256")
