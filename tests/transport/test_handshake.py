"""The peer that gets in, with real sockets: the one that knows the secret, whatever others do meanwhile."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from skyctl.transport import handshake
from skyctl.transport.handshake import (
    HELLO_BYTES,
    MAGIC,
    MAX_LOGGED_REFUSALS,
    MAX_STRANGERS,
    MAX_STRANGERS_PER_ADDRESS,
    NONCE_BYTES,
    AuthenticatedSocket,
    AuthenticatingListener,
    AuthenticationError,
    Caller,
    connect_authenticated,
    open_listener,
    recv_exactly,
)

from ..helpers.processes import until

NOTHING = bytes(64)
StartListener = Callable[..., "ListenerThread"]
SECRET = "a secret of this test"
CALLER = Caller(SECRET, "test")
HERE = "127.0.0.1"


class ListenerThread:
    """A listener whose ``accept`` runs in a thread of its own."""

    def __init__(self, **options: object) -> None:
        self.log: list[str] = []
        options = {"purpose": "test", "log": self.log.append} | options
        self.gate = AuthenticatingListener(open_listener(HERE), SECRET, **options)  # type: ignore[arg-type]
        self.port = int(self.gate.port)
        self.got: list[AuthenticatedSocket | BaseException] = []
        self._thread = threading.Thread(target=self._admit)
        self._thread.start()

    def _admit(self) -> None:
        try:
            self.got.append(self.gate.accept(30.0))
        except OSError as exc:
            self.got.append(exc)

    def enter(self, secret: str = SECRET, purpose: str = "test") -> AuthenticatedSocket:
        return connect_authenticated(HERE, self.port, secret, purpose=purpose, timeout_s=20.0)

    def result(self) -> AuthenticatedSocket | BaseException:
        self._thread.join(30)
        return self.got[0]

    def unauthenticated(self, source: str = HERE) -> socket.socket:
        sock = socket.create_connection((HERE, self.port), 20, (source, 0))
        sock.settimeout(20)
        return sock

    def close(self) -> None:
        self.gate.close()
        self._thread.join(30)
        for entrant in self.got:
            if isinstance(entrant, AuthenticatedSocket):
                entrant.sock.close()


def hello(nonce: bytes = bytes(NONCE_BYTES)) -> bytes:
    """A right one: only who knows the secret can make it."""
    return MAGIC + nonce + handshake._make_proof(CALLER, "hello", nonce)


@pytest.fixture
def door() -> Iterator[Callable[..., ListenerThread]]:
    listeners: list[ListenerThread] = []

    def make(**options: object) -> ListenerThread:
        listeners.append(ListenerThread(**options))
        return listeners[-1]

    yield make
    for listener in listeners:
        listener.close()


def gets_in(door: ListenerThread) -> None:
    with closing(door.enter().sock) as sock:
        admitted = door.result()
        assert isinstance(admitted, AuthenticatedSocket)
        admitted.sock.sendall(b"hello")
        assert recv_exactly(sock, 5) == b"hello"


def test_both_ends_have_the_same_fresh_key(door: StartListener) -> None:
    keys = []
    for _ in range(2):
        listener = door()
        with closing((mine := listener.enter()).sock):
            theirs = listener.result()
            assert isinstance(theirs, AuthenticatedSocket)
            assert mine.key == theirs.key
            assert SECRET.encode() not in mine.key
            assert mine.key.hex() not in repr(mine)
        keys.append(mine.key)
    assert keys[0] != keys[1]


def test_a_wrong_secret_or_purpose_is_found_out_by_the_one_who_enters(
    door: StartListener,
) -> None:
    listener = door()
    with pytest.raises(AuthenticationError, match="does not know the secret"):
        listener.enter(secret="another")
    with pytest.raises(AuthenticationError):
        listener.enter(purpose="something else")
    gets_in(listener)
    assert len(listener.log) == 2
    assert "refused an unauthenticated peer, 127.0.0.1:" in listener.log[0]
    assert all(SECRET not in line for line in listener.log)


def test_a_gate_that_does_not_know_the_secret_learns_nothing_and_lets_nobody_in() -> None:
    """It can't tell a right proof from a wrong one either: the connector gives none."""
    with closing(open_listener(HERE)) as listener:
        heard: list[bytes] = []

        def pretend() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(20)
                recv_exactly(sock, HELLO_BYTES)
                sock.sendall(NOTHING)
                heard.append(sock.recv(100))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(AuthenticationError):
            connect_authenticated(HERE, listener.getsockname()[1], SECRET, purpose="test", timeout_s=20.0)
        thread.join(20)
    assert heard == [b""]


def test_a_listeners_own_proof_sent_back_does_not_open_it(door: StartListener) -> None:
    listener = door()
    with listener.unauthenticated() as sock:
        sock.sendall(hello())
        answer = recv_exactly(sock, 64)
        sock.sendall(answer[32:])
        assert sock.recv(1) == b""
    gets_in(listener)
    assert "its proof is wrong" in listener.log[0]


def test_what_speaks_something_else_is_sent_away_at_its_first_bytes(
    door: StartListener,
) -> None:
    listener = door()
    with listener.unauthenticated() as sock:
        sock.sendall(b"GET")
        assert sock.recv(1) == b""
    with listener.unauthenticated() as sock:
        pass
    gets_in(listener)
    assert ["something else" in line for line in listener.log] == [True, False]
    assert "closed the connection without a proof" in listener.log[1]


def test_the_silent_are_dropped_in_time(door: StartListener) -> None:
    listener = door(handshake_timeout_s=2.0)  # the one that gets in has no longer either
    with listener.unauthenticated() as silent, listener.unauthenticated() as slow:
        slow.sendall(MAGIC[:3])
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""
    assert all("no proof within" in line for line in listener.log)
    gets_in(listener)


def test_a_wrong_hello_learns_nothing_and_a_right_one_serves_once(door: StartListener) -> None:
    listener = door()
    with (
        listener.unauthenticated() as guessing,
        listener.unauthenticated() as first,
        listener.unauthenticated() as again,
    ):
        guessing.sendall(MAGIC + bytes(NONCE_BYTES + 32))
        assert recv_exactly(guessing, 64) == NOTHING
        assert guessing.recv(1) == b""
        first.sendall(hello())
        assert recv_exactly(first, 64) != NOTHING
        again.sendall(hello())  # as heard on the wire
        assert again.recv(64) == b""
    gets_in(listener)
    assert ["does not know the secret" in line for line in listener.log] == [True, False, False]
    assert "another's before" in listener.log[1]


def test_a_crowd_between_hello_and_proof_keeps_nobody_out(door: StartListener) -> None:
    """As many as come within a long round trip: who has said hello stays."""
    listener = door(handshake_timeout_s=60.0)
    crowd: list[socket.socket] = []
    with closing(listener.unauthenticated()) as sock:
        mine = bytes(NONCE_BYTES)
        sock.sendall(hello(mine))
        answer = recv_exactly(sock, 64)
        try:
            crowd += [
                listener.unauthenticated() for _ in range(MAX_STRANGERS_PER_ADDRESS + MAX_LOGGED_REFUSALS + 9)
            ]
            until(lambda: len(listener.log) == MAX_LOGGED_REFUSALS)
            sock.sendall(handshake._make_proof(CALLER, "connector", mine + answer[:NONCE_BYTES]))
            assert recv_exactly(sock, 1) == b"\1"
            assert isinstance(listener.result(), AuthenticatedSocket)
            assert len(listener.gate._pending) <= MAX_STRANGERS_PER_ADDRESS
            assert listener.log[-1].endswith("further ones are not logged")
        finally:
            for stranger in crowd:
                stranger.close()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is this machine on Linux alone")
def test_a_crowd_from_elsewhere_keeps_not_even_the_slow_out(door: StartListener) -> None:
    """Each address has so many connections, and no more; in all there is room for several such crowds."""
    listener = door(handshake_timeout_s=60.0)
    crowd: list[socket.socket] = []
    with closing(listener.unauthenticated()) as slow:
        try:
            for last in range(2, 2 + MAX_STRANGERS // MAX_STRANGERS_PER_ADDRESS - 1):
                crowd += [
                    listener.unauthenticated(f"127.0.0.{last}") for _ in range(MAX_STRANGERS_PER_ADDRESS + 9)
                ]
            slow.sendall(hello())
            assert recv_exactly(slow, 64) != NOTHING
        finally:
            for stranger in crowd:
                stranger.close()
    gets_in(listener)


def test_closing_a_gate_ends_the_wait_and_cuts_off_those_within(door: StartListener) -> None:
    listener = door()
    with listener.unauthenticated() as sock:
        sock.sendall(hello())
        recv_exactly(sock, 64)
        listener.gate.close()
        assert sock.recv(1) == b""
    assert isinstance(listener.result(), ConnectionAbortedError)
    with pytest.raises(OSError, match="refused"):
        listener.unauthenticated()
    listener.gate.close()


def test_what_was_found_out_is_told_though_the_last_attempt_had_no_time_to() -> None:
    gate = AuthenticatingListener(open_listener(HERE), "another", purpose="test", log=lambda _line: None)

    def refuse_one() -> None:
        while not gate.refused_count:
            with suppress(TimeoutError):
                gate.accept(0.05)

    refusing = threading.Thread(target=refuse_one)
    with closing(gate):
        refusing.start()
        with pytest.raises(TimeoutError, match="does not know the secret"):
            connect_authenticated(HERE, gate.port, SECRET, purpose="test", timeout_s=2.0, is_patient=True)
        refusing.join(20)


def test_a_time_out_counts_the_refused() -> None:
    gate = AuthenticatingListener(open_listener(HERE), SECRET, purpose="test", log=lambda _line: None)
    with closing(gate):
        socket.create_connection((HERE, gate.port), 20).close()
        with pytest.raises(TimeoutError, match="nobody came; 1 that did not know the secret"):
            gate.accept(1.0)
    with pytest.raises(ValueError, match="secret"), closing(open_listener(HERE)) as sock:
        AuthenticatingListener(sock, "", purpose="test")
