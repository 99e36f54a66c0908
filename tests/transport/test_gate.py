"""Who gets in, with real sockets: the one that knows the secret, whatever strangers do meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from skyctl.transport.gate import (
    MAGIC,
    MOST_TOLD,
    NONCE_BYTES,
    Admitted,
    Gate,
    ImpostorError,
    enter,
    exactly,
    listening,
)

SECRET = "a secret of this test"
HERE = "127.0.0.1"


class Door:
    """A gate whose ``admit`` runs in a thread of its own."""

    def __init__(self, **options: object) -> None:
        self.told: list[str] = []
        options = {"purpose": "test", "tell": self.told.append} | options
        self.gate = Gate(listening(HERE), SECRET, **options)  # type: ignore[arg-type]
        self.port = int(self.gate.port)
        self.got: list[Admitted | BaseException] = []
        self._thread = threading.Thread(target=self._admit)
        self._thread.start()

    def _admit(self) -> None:
        try:
            self.got.append(self.gate.admit(30.0))
        except OSError as exc:
            self.got.append(exc)

    def enter(self, secret: str = SECRET, purpose: str = "test") -> Admitted:
        return enter(HERE, self.port, secret, purpose=purpose, timeout_s=20.0)

    def result(self) -> Admitted | BaseException:
        self._thread.join(30)
        return self.got[0]

    def stranger(self) -> socket.socket:
        sock = socket.create_connection((HERE, self.port), 20)
        sock.settimeout(20)
        return sock

    def close(self) -> None:
        self.gate.close()
        self._thread.join(30)
        for one in self.got:
            if isinstance(one, Admitted):
                one.sock.close()


@pytest.fixture
def door() -> Iterator[Callable[..., Door]]:
    made: list[Door] = []

    def make(**options: object) -> Door:
        made.append(Door(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def gets_in(door: Door) -> None:
    with closing(door.enter().sock) as sock:
        admitted = door.result()
        assert isinstance(admitted, Admitted)
        admitted.sock.sendall(b"hello")
        assert exactly(sock, 5) == b"hello"


def test_both_ends_have_the_same_fresh_key(door: Callable[..., Door]) -> None:
    keys = []
    for _ in range(2):
        one = door()
        with closing((mine := one.enter()).sock):
            theirs = one.result()
            assert isinstance(theirs, Admitted)
            assert mine.key == theirs.key
            assert SECRET.encode() not in mine.key
            assert mine.key.hex() not in repr(mine)
        keys.append(mine.key)
    assert keys[0] != keys[1]


def test_a_wrong_secret_or_purpose_is_found_out_by_the_one_who_enters(door: Callable[..., Door]) -> None:
    one = door()
    with pytest.raises(ImpostorError, match="does not know the secret"):
        one.enter(secret="another")
    with pytest.raises(ImpostorError):
        one.enter(purpose="something else")
    gets_in(one)
    assert len(one.told) == 2
    assert "refused a stranger, 127.0.0.1:" in one.told[0]
    assert all(SECRET not in line for line in one.told)


def test_a_gate_that_does_not_know_the_secret_learns_nothing_and_lets_nobody_in() -> None:
    """It can't tell a right proof from a wrong one either: the connector gives none."""
    with closing(listening(HERE)) as listener:
        heard: list[bytes] = []

        def pretend() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(20)
                exactly(sock, len(MAGIC) + NONCE_BYTES)
                sock.sendall(bytes(64))
                heard.append(sock.recv(100))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ImpostorError):
            enter(HERE, listener.getsockname()[1], SECRET, purpose="test", timeout_s=20.0)
        thread.join(20)
    assert heard == [b""]


def test_a_listeners_own_proof_sent_back_does_not_open_it(door: Callable[..., Door]) -> None:
    one = door()
    with one.stranger() as sock:
        sock.sendall(MAGIC + bytes(NONCE_BYTES))
        answer = exactly(sock, 64)
        sock.sendall(answer[32:])
        assert sock.recv(1) == b""
    gets_in(one)
    assert "its proof is wrong" in one.told[0]


def test_what_speaks_something_else_is_sent_away_at_its_first_bytes(door: Callable[..., Door]) -> None:
    one = door()
    with one.stranger() as sock:
        sock.sendall(b"GET")
        assert sock.recv(1) == b""
    with one.stranger() as sock:
        pass
    gets_in(one)
    assert ["something else" in line for line in one.told] == [True, False]
    assert "left without a proof" in one.told[1]


def test_the_silent_are_dropped_in_time(door: Callable[..., Door]) -> None:
    one = door(stranger_s=0.2)
    with one.stranger() as silent, one.stranger() as slow:
        slow.sendall(MAGIC[:3])
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""
    assert all("no proof within" in line for line in one.told)
    gets_in(one)


def test_a_crowd_of_strangers_keeps_nobody_out(door: Callable[..., Door]) -> None:
    """Far more than may stall at a time: the oldest go, the peer comes through."""
    one = door(most=4, stranger_s=60.0)
    crowd = [one.stranger() for _ in range(MOST_TOLD + 10)]
    try:
        gets_in(one)
        assert len(one.gate._callers) <= 4
        assert len(one.told) == MOST_TOLD
        assert one.told[-1].endswith("further ones are not told")
    finally:
        for sock in crowd:
            sock.close()


def test_closing_a_gate_ends_the_wait_and_cuts_off_those_within(door: Callable[..., Door]) -> None:
    one = door()
    with one.stranger() as sock:
        sock.sendall(MAGIC + bytes(NONCE_BYTES))
        exactly(sock, 64)
        one.gate.close()
        assert sock.recv(1) == b""
    assert isinstance(one.result(), ConnectionAbortedError)
    with pytest.raises(OSError, match="refused"):
        one.stranger()
    one.gate.close()


def test_nobody_is_a_time_out_that_tells_of_strangers() -> None:
    gate = Gate(listening(HERE), SECRET, purpose="test", tell=lambda _line: None)
    with closing(gate):
        socket.create_connection((HERE, gate.port), 20).close()
        with pytest.raises(TimeoutError, match="nobody came; 1 that did not know the secret"):
            gate.admit(0.3)
    with pytest.raises(ValueError, match="secret"), closing(listening(HERE)) as sock:
        Gate(sock, "", purpose="test")
