"""The agent's end of a held session, without an agent: who is let in, and what is taken from them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.agent import unix_socket
from skyctl.agent.frames import FrameParser, encode_frame
from skyctl.agent.launcher_connection import MAX_PENDING_STREAMS, ResumableLauncherConnection

Message = dict[str, Any]
CONFIG = {"lease_s": 60, "hold_s": 60, "owner": "ours"}


class LauncherEnd:
    """A launcher's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._parser = FrameParser()

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.sock.sendall(encode_frame(message))

    def received(self) -> list[Message]:
        """The messages that have come by now; an ``end`` if the connection was closed."""
        messages: list[Message] = []
        self.sock.setblocking(False)
        try:
            while data := self.sock.recv(1 << 16):
                self._parser.feed(data)
            messages.append({"op": "end"})
        except (BlockingIOError, ConnectionResetError):
            pass
        return [message for message, _ in self._parser.frames()] + messages


class AgentEnd:
    """A line, its first connection, and what the agent is given of it."""

    def __init__(self, folder: Path, **changes: object) -> None:
        ours, theirs = socket.socketpair()
        self.folder = folder
        self.first_launcher = LauncherEnd(theirs)
        self.adoptions = 0
        with ours:
            fds = os.dup(ours.fileno()), os.dup(ours.fileno())
        self.in_fd = fds[0]
        self.connection = ResumableLauncherConnection(
            {**CONFIG, **changes}, *fds, folder, lambda: {"pid": 7}, self._adopted
        )
        self._launchers = [self.first_launcher]

    def _adopted(self) -> None:
        self.adoptions += 1

    def run_turns(self) -> list[Message]:
        """Some turns of the agent's loop: every descriptor is looked at."""
        messages = []
        for _ in range(4):
            self.connection.flush()
            messages += [
                message for message, _ in self.connection.read_messages(self.connection.poll_events())
            ]
        self.connection.flush()
        self.connection.check_timeouts()
        return messages

    def connect(self, **words: object) -> LauncherEnd:
        """Another launcher, or the same once more."""
        launcher = LauncherEnd(unix_socket.connect_to_session(self.folder.parent, self.folder.name))
        self._launchers.append(launcher)
        launcher.send({"op": "resume", "owner": "ours", "n": 0, "r": 0, **words})
        self.run_turns()
        return launcher

    def close(self) -> None:
        self.connection.flush_for_exit()
        self.connection._disconnect()
        for launcher in self._launchers:
            launcher.sock.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentEnd]:
    """One whose standard streams are left alone when it lets go of its first connection."""
    folder = tmp_path / "s-x"
    folder.mkdir()
    monkeypatch.setattr("skyctl.agent.launcher_connection.os.dup2", lambda *_: None)
    end = AgentEnd(folder)
    end.first_launcher.send({"op": "ping"})
    end.run_turns()
    assert end.first_launcher.received() == [{"op": "pong"}]
    yield end
    end.close()
    os.close(end.in_fd)


def test_each_message_is_acted_on_once(agent: AgentEnd) -> None:
    agent.first_launcher.send(
        {"op": "a", "n": 1}, {"op": "b", "n": 2}, {"op": "a", "n": 1}, {"op": "c", "n": 3}
    )
    assert [message["op"] for message in agent.run_turns()] == ["a", "b", "c"]
    assert agent.first_launcher.received()[-1] == {"op": "ack", "n": 3}
    again = agent.connect()
    again.send({"op": "c", "n": 3}, {"op": "d", "n": 4})
    assert [message["op"] for message in agent.run_turns()] == ["d"]
    assert [message["op"] for message in again.received()] == ["hello", "ack"]


@pytest.mark.parametrize(
    "fault",
    [{"op": "a", "n": 3}, {"op": "a"}, {"op": "ack"}, {"op": "ack", "n": "x", "r": 0}, {"op": "a", "n": "x"}],
)
def test_what_makes_no_sense_ends_the_connection_alone(agent: AgentEnd, fault: Message) -> None:
    agent.first_launcher.send({"op": "a", "n": 1}, fault)
    assert len(agent.run_turns()) == 1
    assert agent.first_launcher.received()[-1] == {"op": "end"}
    assert agent.connection.failure is None
    assert agent.connect().received()[0]["received"] == 1


def test_resumed_where_it_was(agent: AgentEnd) -> None:
    for number in range(1, 6):
        assert agent.connection.send({"op": "event", "k": number}) == number
    agent.connection.replies.push({"op": "reply"})
    agent.run_turns()
    assert len(agent.first_launcher.received()) == 6
    agent.first_launcher.send({"op": "ack", "n": 2, "r": 0})
    agent.run_turns()
    second = agent.connect(n=4)
    hello, *rest = second.received()
    assert (hello["op"], hello["pid"], hello["n"], hello["r"], hello["received"]) == ("hello", 7, 4, 0, 0)
    assert sorted((message["op"], message.get("n")) for message in rest) == [("event", 5), ("reply", None)]
    assert agent.first_launcher.received()[-1] == {"op": "end"}


def test_taken_over(agent: AgentEnd) -> None:
    """Events that the first acknowledged are gone, replies were for it alone, and it does not come back."""
    for number in range(5):
        agent.connection.send({"op": "event", "k": number})
    agent.connection.replies.push({"op": "reply"})
    agent.run_turns()
    agent.first_launcher.received()
    agent.first_launcher.send({"op": "ack", "n": 2, "r": 0})
    agent.run_turns()
    second = agent.connect(owner="theirs", adopt=True)
    hello, *rest = second.received()
    assert (hello["n"], hello["r"]) == (2, 1)
    assert [message["n"] for message in rest] == [3, 4, 5]
    assert agent.adoptions == 1
    assert agent.first_launcher.received() == [{"op": "taken"}, {"op": "end"}]
    fault, end = agent.connect().received()
    assert fault["taken"]
    assert end == {"op": "end"}
    assert agent.adoptions == 1
    agent.connection.send({"op": "event"})
    agent.run_turns()
    assert second.received()[-1]["n"] == 6


def test_more_than_was_sent(agent: AgentEnd) -> None:
    assert agent.connect(n=1).received()[0]["error"] == "it has sent 0 messages, not 1"
    assert agent.connect(n="x").received()[0] == {"op": "fault"}
    agent.first_launcher.send({"op": "ping"})
    agent.run_turns()
    assert agent.first_launcher.received() == [{"op": "pong"}], "who could not come in has not pushed it out"


def test_too_much_is_kept(agent: AgentEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of output are left out then; tasks wait only for a launcher that is there and does not read."""
    for place in ("retransmission_queue", "launcher_connection"):
        monkeypatch.setattr(f"skyctl.agent.{place}.MAX_SPOOL_BYTES", 10_000)
    monkeypatch.setattr("skyctl.agent.launcher_connection.WRITE_AHEAD_BYTES", 0)
    assert (agent.connection.drops_output, agent.connection.pauses_tasks) == (False, False)
    last = [agent.connection.send({"op": "event", "text": "x" * 1000}) for _ in range(20)][-1]
    assert (agent.connection.drops_output, agent.connection.pauses_tasks) == (True, True)
    agent.first_launcher.sock.shutdown(socket.SHUT_RDWR)
    agent.run_turns()
    assert (agent.connection.drops_output, agent.connection.pauses_tasks) == (True, False)
    second = agent.connect()
    second.send({"op": "ack", "n": last, "r": 0})
    agent.run_turns()
    assert (agent.connection.drops_output, agent.connection.pauses_tasks) == (False, False)


def test_ending(agent: AgentEnd) -> None:
    """Its own launcher may come back for the last words; nobody else takes over what ends."""
    agent.connection.announced_end = "it was told to"
    assert agent.connect(owner="theirs", adopt=True).received()[0]["gone"]
    assert agent.connect().received()[1] == {"op": "ending", "why": "it was told to"}


def test_a_crowd_at_the_door(agent: AgentEnd) -> None:
    waiting = [agent.connect(op="nothing", owner=None) for _ in range(2)]
    assert all(launcher.received()[0]["op"] == "fault" for launcher in waiting)
    stray = LauncherEnd(unix_socket.connect_to_session(agent.folder.parent, agent.folder.name))
    stray.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    agent.run_turns()
    assert stray.received() == [{"op": "fault"}, {"op": "end"}]
    stray.sock.close()
    silent = [
        unix_socket.connect_to_session(agent.folder.parent, agent.folder.name)
        for _ in range(MAX_PENDING_STREAMS + 2)
    ]
    for _ in range(MAX_PENDING_STREAMS + 2):
        agent.run_turns()
    assert agent.connect().received()[0]["op"] == "hello"
    for sock in silent:
        sock.close()
    agent.run_turns()


def test_holds_for_its_time(tmp_path: Path, agent: AgentEnd) -> None:
    agent.connection._hold_s = 0.05
    agent.run_turns()
    assert agent.connection.failure is None, "somebody is there"
    agent.first_launcher.sock.shutdown(socket.SHUT_RDWR)
    agent.run_turns()
    time.sleep(0.1)
    agent.run_turns()
    assert agent.connection.failure == "no launcher had come back to it for 0.05 s"


def test_a_launcher_that_never_spoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know of us, so nobody would come."""
    monkeypatch.setattr("skyctl.agent.launcher_connection.os.dup2", lambda *_: None)
    agent = AgentEnd(tmp_path)
    agent.first_launcher.sock.shutdown(socket.SHUT_RDWR)
    agent.run_turns()
    assert agent.connection.failure == "the launcher is gone"
    agent.close()
    os.close(agent.in_fd)
