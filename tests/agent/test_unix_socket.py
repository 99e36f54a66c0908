"""The socket in a session's folder, and the relay that carries a new connection's bytes to it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl.agent import unix_socket


@pytest.fixture(params=["s-short", "s-" + "long" * 40])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A session's folder; the second one's path is too long for a socket."""
    path = tmp_path / request.param
    path.mkdir(mode=0o700)
    return path


def test_who_comes_is_let_in(folder: Path) -> None:
    with unix_socket.listen_in_folder(folder) as listener:
        assert unix_socket.accept_same_user(listener) is None
        with unix_socket.connect_to_session(folder.parent, folder.name) as theirs:
            ours = unix_socket.accept_same_user(listener)
            assert ours is not None
            with ours:
                ours.sendall(b"x")
                assert theirs.recv(1) == b"x"
    with pytest.raises(ConnectionRefusedError):
        unix_socket.connect_to_session(folder.parent, folder.name)


def test_another_user_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        unix_socket.listen_in_folder(folder) as listener,
        unix_socket.connect_to_session(folder.parent, folder.name) as theirs,
    ):
        monkeypatch.setattr(unix_socket.os, "getuid", lambda: os.geteuid() + 1)
        assert unix_socket.accept_same_user(listener) is None
        assert theirs.recv(1) == b""


@pytest.mark.parametrize("name", ["s-none", "../s-short", "", "s-a/../../x", "s-\0"])
def test_no_such_session(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError):
        unix_socket.connect_to_session(tmp_path, name)


def test_same_user_where_the_system_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_PEERCRED")
    with socket.socket(socket.AF_UNIX) as sock:
        assert unix_socket.is_same_user(sock)


class Ends:
    """A running relay: the launcher's end, the agent's end, and the relay's thread."""

    def __init__(self) -> None:
        self.launcher, streams = socket.socketpair()
        self.agent, sock = socket.socketpair()
        for end in (self.launcher, self.agent):
            end.settimeout(20)

        def work() -> None:
            with streams, sock:
                unix_socket.relay_streams(sock, streams.fileno(), streams.fileno())

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def ended(self) -> bool:
        self.thread.join(20)
        return not self.thread.is_alive()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.launcher.close()
    ends.agent.close()
    assert ends.ended()


def received(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := sock.recv(1 << 16)):
        data += part
    return data


def test_both_ways_at_once(ends: Ends) -> None:
    ways = [(ends.launcher, ends.agent), (ends.agent, ends.launcher)]
    texts = [os.urandom(5 << 20) for _ in ways]
    senders = [
        threading.Thread(target=way[0].sendall, args=(text,)) for way, text in zip(ways, texts, strict=True)
    ]
    got: dict[int, bytes] = {}

    def receive(index: int) -> None:
        got[index] = received(ways[index][1], len(texts[index]))

    receivers = [threading.Thread(target=receive, args=(index,)) for index in range(2)]
    for thread in [*senders, *receivers]:
        thread.start()
    for thread in [*senders, *receivers]:
        thread.join(30)
    assert [got[0], got[1]] == texts


@pytest.mark.parametrize("first", ["launcher", "agent"])
def test_ends_with_either_side(ends: Ends, first: str) -> None:
    leaving = getattr(ends, first)
    other = ends.agent if first == "launcher" else ends.launcher
    leaving.sendall(b"last words")
    leaving.close()
    assert received(other, 100) == b"last words"
    assert ends.ended()


def test_an_agent_that_ends_while_nobody_reads(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay can't pass on its last words, and does not wait for ever to do so."""
    monkeypatch.setattr(unix_socket, "RELAY_FLUSH_S", 0.1)
    ends.agent.settimeout(0.5)
    with pytest.raises(TimeoutError):
        ends.agent.sendall(b"x" * (64 << 20))
    ends.agent.close()
    assert ends.ended()
