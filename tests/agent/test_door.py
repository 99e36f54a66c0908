"""The socket in a session's folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from skyctl.agent import door


@pytest.fixture(params=["s-short", "s-" + "long" * 40])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A session's folder; the second one's path is too long for a socket."""
    path = tmp_path / request.param
    path.mkdir(mode=0o700)
    return path


def test_who_comes_is_let_in(folder: Path) -> None:
    with door.listen(folder) as listener:
        assert door.admit(listener) is None
        with door.enter(folder.parent, folder.name) as theirs:
            ours = door.admit(listener)
            assert ours is not None
            with ours:
                ours.sendall(b"x")
                assert theirs.recv(1) == b"x"
    with pytest.raises(ConnectionRefusedError):
        door.enter(folder.parent, folder.name)


def test_another_user_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with door.listen(folder) as listener, door.enter(folder.parent, folder.name) as theirs:
        monkeypatch.setattr(door.os, "getuid", lambda: os.geteuid() + 1)
        assert door.admit(listener) is None
        assert theirs.recv(1) == b""


@pytest.mark.parametrize("name", ["s-none", "../s-short", "", "s-a/../../x", "s-\0"])
def test_no_such_session(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError):
        door.enter(tmp_path, name)


def test_same_user_where_the_system_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_PEERCRED")
    with socket.socket(socket.AF_UNIX) as sock:
        assert door.same_user(sock)
