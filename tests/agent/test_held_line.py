"""The agent's end of a held session, without an agent: who is let in, and what is taken from them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.agent import door
from skyctl.agent.held import KNOCKING, HeldLine
from skyctl.agent.wire import Parser, encode

Message = dict[str, Any]
CONFIG = {"lease_s": 60, "hold_s": 60, "owner": "ours"}


class Far:
    """A launcher's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._parser = Parser()

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.sock.sendall(encode(message))

    def heard(self) -> list[Message]:
        """What has come by now; an ``end`` where it was closed."""
        found: list[Message] = []
        self.sock.setblocking(False)
        try:
            while data := self.sock.recv(1 << 16):
                self._parser.feed(data)
            found.append({"op": "end"})
        except (BlockingIOError, ConnectionResetError):
            pass
        return [message for message, _ in self._parser.frames()] + found


class Near:
    """A line, its first connection, and what the agent is given of it."""

    def __init__(self, folder: Path, **changes: object) -> None:
        ours, theirs = socket.socketpair()
        self.folder = folder
        self.first = Far(theirs)
        self.adoptions = 0
        with ours:
            fds = os.dup(ours.fileno()), os.dup(ours.fileno())
        self.line = HeldLine({**CONFIG, **changes}, *fds, folder, lambda: {"pid": 7}, self._adopted)
        self._fars = [self.first]

    def _adopted(self) -> None:
        self.adoptions += 1

    def turn(self) -> list[Message]:
        """Some turns of the agent's loop: every descriptor is looked at."""
        found = []
        for _ in range(4):
            self.line.flush()
            found += [message for message, _ in self.line.read(self.line.interests())]
        self.line.flush()
        self.line.watch()
        return found

    def come(self, **words: object) -> Far:
        """Another launcher, or the same once more."""
        far = Far(door.enter(self.folder.parent, self.folder.name))
        self._fars.append(far)
        far.say({"op": "resume", "owner": "ours", "n": 0, "r": 0, **words})
        self.turn()
        return far

    def close(self) -> None:
        self.line.drain()
        self.line._leave()
        for far in self._fars:
            far.sock.close()


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Near]:
    """One whose standard streams are left alone when it lets go of its first connection."""
    folder = tmp_path / "s-x"
    folder.mkdir()
    monkeypatch.setattr("skyctl.agent.held.os.dup2", lambda *_: None)
    found = Near(folder)
    found.first.say({"op": "ping"})
    found.turn()
    assert found.first.heard() == [{"op": "pong"}]
    yield found
    found.close()
    os.close(found.line._in_fd)


def test_each_message_is_acted_on_once(near: Near) -> None:
    near.first.say({"op": "a", "n": 1}, {"op": "b", "n": 2}, {"op": "a", "n": 1}, {"op": "c", "n": 3})
    assert [message["op"] for message in near.turn()] == ["a", "b", "c"]
    assert near.first.heard()[-1] == {"op": "ack", "n": 3}
    again = near.come()
    again.say({"op": "c", "n": 3}, {"op": "d", "n": 4})
    assert [message["op"] for message in near.turn()] == ["d"]
    assert [message["op"] for message in again.heard()] == ["hello", "ack"]


@pytest.mark.parametrize("fault", [{"op": "a", "n": 3}, {"op": "a"}, {"op": "ack"}, {"op": "a", "n": "x"}])
def test_what_makes_no_sense_ends_the_connection_alone(near: Near, fault: Message) -> None:
    near.first.say({"op": "a", "n": 1}, fault)
    assert len(near.turn()) == 1
    assert near.first.heard()[-1] == {"op": "end"}
    assert near.line.over is None
    assert near.come().heard()[0]["received"] == 1


def test_resumed_where_it_was(near: Near) -> None:
    for number in range(1, 6):
        assert near.line.push({"op": "event", "k": number}) == number
    near.line.replies.push({"op": "reply"})
    near.turn()
    assert len(near.first.heard()) == 6
    near.first.say({"op": "ack", "n": 2, "r": 0})
    near.turn()
    second = near.come(n=4)
    hello, *rest = second.heard()
    assert (hello["op"], hello["pid"], hello["n"], hello["r"], hello["received"]) == ("hello", 7, 4, 0, 0)
    assert sorted((message["op"], message.get("n")) for message in rest) == [("event", 5), ("reply", None)]
    assert near.first.heard()[-1] == {"op": "end"}


def test_taken_over(near: Near) -> None:
    """What the first had acknowledged is gone, replies were for it alone, and it does not come back."""
    for number in range(5):
        near.line.push({"op": "event", "k": number})
    near.line.replies.push({"op": "reply"})
    near.turn()
    near.first.heard()
    near.first.say({"op": "ack", "n": 2, "r": 0})
    near.turn()
    second = near.come(owner="theirs", adopt=True)
    hello, *rest = second.heard()
    assert (hello["n"], hello["r"]) == (2, 1)
    assert [message["n"] for message in rest] == [3, 4, 5]
    assert near.adoptions == 1
    assert near.first.heard() == [{"op": "taken"}, {"op": "end"}]
    fault, end = near.come().heard()
    assert fault["taken"]
    assert end == {"op": "end"}
    assert near.adoptions == 1
    near.line.push({"op": "event"})
    near.turn()
    assert second.heard()[-1]["n"] == 6


def test_more_than_was_sent(near: Near) -> None:
    assert near.come(n=1).heard()[0]["error"] == "it has sent 0 messages, not 1"
    assert near.come(n="x").heard()[0] == {"op": "fault"}
    near.first.say({"op": "ping"})
    near.turn()
    assert near.first.heard() == [{"op": "pong"}], "who could not come in has not pushed it out"


def test_ending(near: Near) -> None:
    """Its own launcher may come back for the last words; nobody else takes over what ends."""
    near.line.ending = "it was told to"
    assert near.come(owner="theirs", adopt=True).heard()[0]["gone"]
    assert near.come().heard()[1] == {"op": "ending", "why": "it was told to"}


def test_a_crowd_at_the_door(near: Near) -> None:
    waiting = [near.come(op="nothing", owner=None) for _ in range(2)]
    assert all(far.heard()[0]["op"] == "fault" for far in waiting)
    silent = [door.enter(near.folder.parent, near.folder.name) for _ in range(KNOCKING + 2)]
    for _ in range(KNOCKING + 2):
        near.turn()
    assert near.come().heard()[0]["op"] == "hello"
    for sock in silent:
        sock.close()
    near.turn()


def test_holds_for_its_time(tmp_path: Path, near: Near) -> None:
    near.line._hold_s = 0.05
    near.turn()
    assert near.line.over is None, "somebody is there"
    near.first.sock.shutdown(socket.SHUT_RDWR)
    near.turn()
    time.sleep(0.1)
    near.turn()
    assert near.line.over == "no launcher had come back to it for 0.05 s"


def test_a_launcher_that_never_spoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know of us, so nobody would come."""
    monkeypatch.setattr("skyctl.agent.held.os.dup2", lambda *_: None)
    near = Near(tmp_path)
    near.first.sock.shutdown(socket.SHUT_RDWR)
    near.turn()
    assert near.line.over == "the launcher is gone"
    near.close()
    os.close(near.line._in_fd)
