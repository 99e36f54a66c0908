"""Sessions that outlive their connections: real agents and processes of this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import cast

import pytest

from skyctl.agent import process_tree
from skyctl.errors import SessionGoneError, SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote import resumable_connection
from skyctl.remote.agent_messages import AgentHello
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions, NodeConnection
from skyctl.remote.forkserver_client import ForkedConnection, ForkServerClient
from skyctl.remote.resumable_connection import DialledChannel, ResumableConnection
from skyctl.remote.session_factory import adopt_session, adopt_sessions, open_session

from .answers import run_node_task
from .fake_connection import FakeConnection
from .resumable_helpers import HELD, LOCAL, MANUAL, PATIENCE_S, Reader, Switch, assert_without_gap, cut, until

Env = Callable[[Session], dict[str, str]]
Connector = Callable[..., NodeConnection]


@pytest.fixture
def forkserver(home: Path) -> Iterator[ForkServerClient]:
    """One that has not imported torch, which takes seconds."""
    client = ForkServerClient(("skyctl.agent.task_runner",))
    yield client
    client.release()


@pytest.fixture(params=["alone", "forked"])
def connector(request: pytest.FixtureRequest) -> Connector | None:
    """How the agent starts: a Python of its own, or forked by a fork server."""
    if request.param == "alone":
        return None
    forkserver = request.getfixturevalue("forkserver")
    return lambda node, _: ForkedConnection(node, forkserver)


def opened(options: ConnectOptions = HELD, connector: Connector | None = None) -> Session:
    return open_session(LOCAL, options, connector) if connector else open_session(LOCAL, options)


@pytest.mark.parametrize("options", [HELD, MANUAL], ids=["automatic", "manual"])
def test_twenty_cuts(home: Path, task_env: Env, options: ConnectOptions, connector: Connector | None) -> None:
    """At full speed both ways: nothing is missing, and nothing comes twice."""
    with opened(options, connector) as session:
        task = session.start_task("node_tasks", {"do": "count"}, env=task_env(session))
        reader = Reader(session, task)
        sent = []
        for turn in range(20):
            seen = len(reader.events)
            until(lambda seen=seen: len(reader.events) > seen + 50)
            for k in range(turn * 10, turn * 10 + 10):
                task.send({"k": k})
                sent.append(k)
            cut(session)
        task.send({"op": "stop"})
        assert_without_gap(reader.all(), sent)
        until(lambda: session.disconnected_s == 0)
        assert session.lost is None
        assert run_node_task(session, {"do": "noisy"}, 20, task_env(session)) == {}


def test_who_asks_a_silent_node_gets_an_error(
    home: Path, task_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost by it: what runs there goes on, and the node can be asked again once it is heard."""
    monkeypatch.setattr(ResumableConnection, "answer_limit_s", 1.5)
    with opened() as session:
        env = task_env(session)
        os.kill(session.hello.pid, signal.SIGSTOP)
        for ask in (
            lambda: session.push(b"text", sha256(b"text").hexdigest()),
            lambda: run_node_task(session, {"do": "noisy"}, 60, env),
        ):
            with pytest.raises(UnreachableError, match="laptop has not been heard for"):
                ask()
        assert (session.lost, session.is_waited_for) == (None, False)
        os.kill(session.hello.pid, signal.SIGCONT)
        until(lambda: session.is_waited_for)
        monkeypatch.setattr(ResumableConnection, "answer_limit_s", PATIENCE_S)
        assert Path(session.push(b"text", sha256(b"text").hexdigest())).read_bytes() == b"text"
        assert run_node_task(session, {"do": "noisy"}, 20, env) == {}


def test_a_node_that_falls_silent_as_it_is_told_to_end_is_soon_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that was silent before: its agent ends by itself, and a run's end does not wait for it."""
    monkeypatch.setattr(ResumableConnection, "answer_limit_s", 0.3)
    monkeypatch.setattr(resumable_connection, "DETACH_TIMEOUT_S", 0.2)
    words = dict.fromkeys(
        ("folder", "cache", "home", "cwd", "hostname", "platform", "python", "version"), "/"
    )
    hello = AgentHello(op="hello", session="s", pid=1, guardian=2, addresses=(), **words)  # type: ignore[arg-type]

    def dial(_arrived: dict[str, int], _left_s: float) -> DialledChannel:
        raise UnreachableError("its link is cut", node=LOCAL.name)

    node = FakeConnection(LOCAL, lambda _command, stdin, _stdout: int(bool(stdin.read())))
    connection = ResumableConnection(
        LOCAL,
        node.open(""),
        lambda *_: False,
        1e6,
        hello=hello,
        dial=dial,
        redial_s=1e6,
        manual_ack=False,
        on_change=lambda _disconnected: None,
    )
    connection.start()
    ends = threading.Thread(target=connection.close, args=(1e6,), daemon=True)
    ends.start()
    ends.join(PATIENCE_S)
    try:
        assert not ends.is_alive()
    finally:
        connection.drop()
        node.close()


def test_acknowledged_files_are_removed(home: Path, task_env: Env) -> None:
    """More than memory holds goes to disk while nobody is there, and comes from there."""
    session = opened(MANUAL)
    folder = Path(session.hello.folder)
    task = session.start_task("node_tasks", {"do": "count", "bytes": 2000}, env=task_env(session))
    session.detach()
    until(lambda: len(list(folder.glob("kept-n-*"))) > 2)
    with adopt_session(LOCAL, MANUAL, session.id, session.watermark) as second:
        (task_again,) = second.tasks()
        assert (task_again.number, task_again.name, task_again.ended) == (task.number, task.name, False)
        task_again.send({"op": "stop"})
        reader = Reader(second, task_again)
        assert_without_gap(reader.all())
        until(lambda: list(folder.glob("kept-n-*")) == [])
        assert second.watermark == reader.events[-1]["seq"] + 1  # the task's end has a number, too


def test_only_what_was_handled_is_forgotten(home: Path, task_env: Env) -> None:
    """A launcher that had taken events, but not written them, leaves them to the next one."""
    first = opened(MANUAL)
    task = first.start_task("node_tasks", {"do": "echo"}, env=task_env(first))
    for k in range(10):
        task.send({"k": k})
    taken = [event[0] for _ in range(10) if (event := task.recv(20))]
    assert [event["k"] for event in taken] == list(range(10))
    for event in (taken[0], taken[1], taken[2], taken[5]):
        first.acknowledge(event["seq"])
    assert first.watermark == taken[2]["seq"]
    first.detach()
    with adopt_session(LOCAL, MANUAL, first.id, first.watermark) as second:  # others may be under way
        (task_again,) = second.tasks()
        again = [event[0] for _ in range(7) if (event := task_again.recv(20))]
        assert again == taken[3:]
        task_again.send({"op": "stop"})
        assert second.watermark == taken[2]["seq"]


def test_adopted_from_a_launcher_that_lives(home: Path, task_env: Env) -> None:
    """The one that it is taken from is told so, at once and for good."""
    first = opened(MANUAL)
    task = first.start_task("node_tasks", {"do": "count"}, env=task_env(first))
    reader = Reader(first, task)
    until(lambda: len(reader.events) > 100)
    with adopt_session(LOCAL, MANUAL, first.id, 0) as second:
        until(lambda: first.lost is not None)
        assert isinstance(first.lost, SessionGoneError)
        assert "another launcher has taken it over" in first.lost.message
        first.close()  # though the agent is its child, it is not its to end any more
        assert first.shutdown_failure is None
        later = second.start_task("node_tasks", {"do": "noisy"}, env=task_env(second))
        assert later.number > task.number
        task_again = second.tasks()[0]
        task_again.send({"op": "stop"})
        rest = Reader(second, task_again).all()
        events = {event["seq"]: event for event in [*reader.events, *rest]}
        assert_without_gap([events[seq] for seq in sorted(events)])
        Reader(second, later).all()


def test_tasks_that_had_ended(home: Path, task_env: Env) -> None:
    first = opened(MANUAL)
    task = first.start_task("node_tasks", {"do": "fail", "kind": "exit"}, name="one", env=task_env(first))
    events = Reader(first, task).all()
    until(lambda: first.watermark > events[-1]["seq"])
    first.detach()
    outcomes = adopt_sessions([LOCAL], MANUAL, {"laptop": (first.id, first.watermark)})
    second = outcomes["laptop"]
    assert isinstance(second, Session)
    with second:
        (task_again,) = second.tasks()
        assert (task_again.name, task_again.done, task_again.returncode) == ("one", True, 3)
        assert task_again.recv(0.1) is None


def test_a_task_that_nobody_follows(home: Path, task_env: Env) -> None:
    """As one that was called by a launcher that is gone: given up, it does not hold the watermark back."""
    first = opened(MANUAL)
    env = task_env(first)
    for name in ("left", "followed"):
        first.start_task("node_tasks", {"do": "echo"}, name=name, env=env).send({"k": 1})
    first.detach()
    with adopt_session(LOCAL, MANUAL, first.id, 0) as second:
        left, followed = second.tasks()
        event = followed.recv(20)
        assert event is not None
        second.acknowledge(event[0]["seq"])
        until(lambda: len(left._events) > 0)
        assert second.watermark < left._events[0][0]["seq"]
        second.discard(left)
        assert second.watermark == 2
        left.send({"op": "stop"})
        until(lambda: second.watermark == 4)  # its result, and its end
        assert second.tasks() == [followed]


def test_adopting_many(home: Path) -> None:
    """An error of one is no other's; on an interrupt they are let go of, not ended."""
    nodes = [Node(name=f"n{index}", transport="local") for index in range(3)]
    earlier_sessions = {"n1": ("s-nothing", 0)}
    for node in (nodes[0], nodes[2]):
        session = open_session(node, MANUAL)
        earlier_sessions[node.name] = (session.id, 0)
        session.detach()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adopt_sessions(nodes, MANUAL, earlier_sessions, interrupt)
    outcomes = adopt_sessions(nodes, MANUAL, earlier_sessions)
    assert isinstance(outcomes["n1"], SessionGoneError)
    sessions = [outcome for outcome in outcomes.values() if isinstance(outcome, Session)]
    assert len(sessions) == 2
    for session in sessions:
        session.close()


def test_fetch_and_push_across_cuts(home: Path, task_env: Env, tmp_path: Path) -> None:
    with opened() as session:
        path = run_node_task(session, {"do": "write", "mib": 30}, 30, task_env(session))["path"]
        connection = cast(ResumableConnection, session._connection)
        for work in (
            lambda: session.fetch(path, tmp_path / "got", 1 << 30),
            lambda: session.push_tree({"big": os.urandom(20 << 20)}),
        ):
            thread = threading.Thread(target=work)
            thread.start()
            for _ in range(4):
                seen = dict(connection._arrived), len(connection._unacknowledged)
                until(
                    lambda seen=seen, thread=thread: (
                        seen != (connection._arrived, len(connection._unacknowledged))
                        or not thread.is_alive()
                    )
                )
                cut(session)
                until(lambda: session.disconnected_s == 0)
            thread.join(30)
            assert not thread.is_alive()
        assert (tmp_path / "got").read_bytes() == Path(path).read_bytes()
        assert session.lost is None


def test_the_end_of_the_agent_is_told_at_once(home: Path, task_env: Env) -> None:
    with opened() as session:
        task = session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(session))
        task.recv(20)
        os.kill(session.hello.pid, signal.SIGKILL)
        with pytest.raises(SessionGoneError, match=f"has no session {session.id} any more"):
            task.recv(25)
    assert session.shutdown_failure is None
    with pytest.raises(SessionGoneError, match="it ended, or the node was restarted"):
        adopt_session(LOCAL, HELD, session.id, 0)


def test_an_orderly_end_is_no_cut(home: Path) -> None:
    with opened() as session:
        os.kill(session.hello.pid, signal.SIGTERM)
        until(lambda: session.lost is not None)
        assert "its agent has ended: somebody sent it SIGTERM" in str(session.lost)


def test_away_and_back(home: Path, task_env: Env) -> None:
    switch = Switch()
    changes: list[bool] = []
    with opened(HELD, switch) as session:
        session.on_connection_change = changes.append
        task = session.start_task("node_tasks", {"do": "echo"}, env=task_env(session))
        assert session.disconnected_s == 0.0
        switch.on = False
        cut(session)
        until(lambda: session.disconnected_s > 0.1)
        task.send({"k": 1})
        assert task.recv(0.1) is None
        assert session.lost is None
        switch.on = True
        assert task.recv(20) == ({"event": "echo", "k": 1}, b"")
        assert session.disconnected_s == 0.0
        until(lambda: changes == [True, False])


def test_lost_after_a_time_and_ended_all_the_same(home: Path, task_env: Env) -> None:
    switch = Switch()
    session = opened(replace(HELD, redial_s=0.5), switch)
    task = session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(session))
    task.recv(20)
    switch.on = False
    cut(session)
    with pytest.raises(UnreachableError, match=r"for 0.5 s it could not be reached again: .*no route to it"):
        task.recv(20)
    assert process_tree.process_entry(session.hello.pid) is not None
    switch.on = True
    session.close()
    assert session.shutdown_failure is None
    assert session.surviving_pids == []


def test_close_while_away(home: Path, task_env: Env) -> None:
    switch = Switch()
    session = opened(HELD, switch)
    session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(session)).recv(20)
    switch.on = False
    cut(session)
    until(lambda: session.disconnected_s > 0)
    threading.Timer(0.5, lambda: setattr(switch, "on", True)).start()
    session.close()
    assert session.shutdown_failure is None


def test_what_cannot_be_told_to_end_does_so_by_itself(home: Path, task_env: Env) -> None:
    """``close`` says so; when nobody has come for ``hold_s`` the agent ends all."""
    first = opened(replace(HELD, hold_s=10))
    first.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(first)).recv(20)
    first.detach()
    switch = Switch()
    second = adopt_session(LOCAL, replace(HELD, redial_s=0.1), first.id, 0, switch)
    switch.on = False
    cut(second)
    until(lambda: second.lost is not None)
    second.close()
    assert f"could not be told to end session {first.id}" in str(second.shutdown_failure)
    assert "10 s after it last heard from us" in str(second.shutdown_failure)


def test_a_silent_launcher_is_let_go_of(home: Path, task_env: Env) -> None:
    """One that is stopped: the agent holds when the lease runs out, and it finds its way back."""
    with opened(replace(HELD, lease_s=1)) as session:
        task = session.start_task("node_tasks", {"do": "count"}, env=task_env(session))
        reader = Reader(session, task)
        with session._connection.changed:  # neither reads nor writes
            until(lambda: "agent.log" in os.listdir(session.hello.folder))
        task.send({"op": "stop"})
        assert_without_gap(reader.all())


def test_no_hold_is_as_it_was(home: Path) -> None:
    with open_session(LOCAL, ConnectOptions(grace_s=0.3)) as session:
        assert not Path(session.hello.folder, "line").exists()
        assert (session.disconnected_s, session.watermark, session.tasks()) == (0.0, 0, [])
        with pytest.raises(ValueError, match="ends with its connection"):
            session.detach()
        with pytest.raises(SessionGoneError):
            adopt_session(LOCAL, HELD, session.id, 0)
    with pytest.raises(ValueError, match="need hold_s"):
        ConnectOptions(redial_s=1)


def test_adopted_too_far(home: Path) -> None:
    """A number that the agent never sent is a mistake, not something to wait for."""
    first = opened(MANUAL)
    first.detach()
    with pytest.raises(SkyctlError, match="it has sent 0 messages, not 7"):
        adopt_session(LOCAL, MANUAL, first.id, 7)
    adopt_session(LOCAL, MANUAL, first.id, 0).close()
