"""Held sessions over a real sshd: connections that are killed, stopped, or cut."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from skyctl.agent import process_tree
from skyctl.errors import SessionGoneError
from skyctl.remote.agent_session import Session
from skyctl.remote.session_factory import adopt_session, open_session

from .resumable_helpers import Reader, assert_without_gap, until

Env = Callable[[Session], dict[str, str]]
OPTIONS = {"hold_s": 60, "redial_s": 30, "manual_ack": True}


def drop(session: Session) -> None:
    """Ends its TCP connection."""
    with suppress(OSError):  # just closed
        session._node_connections[-1]._transports[-1].sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]


def server_of(pid: int) -> int:
    """The sshd process of the connection that started that one."""
    row = process_tree.process_entry(pid)
    while row is not None:
        command = Path(f"/proc/{row.parent}/cmdline").read_bytes()
        if b"sshd" in command:
            return row.parent
        row = process_tree.process_entry(row.parent)
    raise AssertionError("no sshd above it")


def relays(home: Path) -> list[int]:
    """Processes of that home that neither are agents nor belong to one: what a redialled connection runs."""
    rows = process_tree.process_table()
    pids = []
    for pid in rows:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if str(home).encode() in environment and b"-u\0-c" in command and b"runpy" not in command:  # no task
            pids.append(pid)
    return pids


@pytest.mark.parametrize("how", ["kill", "stop", "cut"])
def test_connection_lost_and_redialled(sshd, task_env: Env, how: str) -> None:
    with open_session(sshd.node(), sshd.options(**OPTIONS, lease_s=3)) as session:
        task = session.start_task("node_tasks", {"do": "count"}, env=task_env(session))
        reader = Reader(session, task)
        stopped = []
        sent = []
        for turn in range(3):
            seen = len(reader.events)
            until(lambda seen=seen: len(reader.events) > seen + 200)
            task.send({"k": turn})
            sent.append(turn)
            pid = session.hello.pid
            if how == "cut" or turn:
                until(lambda: session.disconnected_s == 0)
                drop(session)
            elif how == "kill":
                os.kill(server_of(pid), signal.SIGKILL)
            else:
                stopped.append(server_of(pid))
                os.kill(stopped[-1], signal.SIGSTOP)
        until(lambda: len(reader.events) > 1000)
        for server in stopped:
            os.kill(server, signal.SIGCONT)
        task.send({"op": "stop"})
        assert_without_gap(reader.all(), sent)
        assert session.lost is None


def test_adopted_over_ssh(sshd, task_env: Env) -> None:
    first = open_session(sshd.node(), sshd.options(**OPTIONS))
    task = first.start_task("node_tasks", {"do": "count"}, env=task_env(first))
    reader = Reader(first, task)
    until(lambda: len(reader.events) > 200)
    first.detach()
    seen = reader.all()
    with adopt_session(sshd.node(), sshd.options(**OPTIONS), first.id, first.watermark) as second:
        assert second.host == "127.0.0.1"
        (task_again,) = second.tasks()
        task_again.send({"op": "stop"})
        assert_without_gap([*seen, *Reader(second, task_again).all()])


def test_agent_killed_over_ssh(sshd, task_env: Env) -> None:
    with open_session(sshd.node(), sshd.options(**OPTIONS)) as session:
        task = session.start_task("node_tasks", {"do": "orphan", "stay": True}, env=task_env(session))
        task.recv(20)
        os.kill(session.hello.pid, signal.SIGKILL)
        with pytest.raises(SessionGoneError, match="node n1 has no session"):
            task.recv(25)


def test_a_relay_that_is_killed(sshd, task_env: Env) -> None:
    with open_session(sshd.node(), sshd.options(**OPTIONS)) as session:
        task = session.start_task("node_tasks", {"do": "echo"}, env=task_env(session))
        task.send({"k": 0})
        event = task.recv(25)  # while a task is being started, the agent's copy of itself looks like a relay
        assert event is not None
        assert event[0]["k"] == 0
        drop(session)
        agent = {session.hello.pid, session.hello.guardian}
        until(lambda: set(relays(sshd.home)) - agent and session.disconnected_s == 0)
        for pid in set(relays(sshd.home)) - agent:
            os.kill(pid, signal.SIGKILL)
        task.send({"k": 1})
        event = task.recv(25)
        assert event is not None
        assert event[0]["k"] == 1
