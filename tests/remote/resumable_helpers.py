"""The helpers that the tests of held sessions share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from skyctl.errors import SkyctlError, UnreachableError
from skyctl.records.cluster import Node
from skyctl.remote.agent_session import Session
from skyctl.remote.base import ConnectOptions, NodeConnection
from skyctl.remote.remote_task import RemoteTask
from skyctl.remote.session_factory import connect_node

LOCAL = Node(name="laptop", transport="local")
HELD = ConnectOptions(grace_s=0.3, hold_s=60, redial_s=30)
MANUAL = ConnectOptions(grace_s=0.3, hold_s=60, redial_s=30, manual_ack=True)
PATIENCE_S = 240.0


def until(holds: Callable[[], object]) -> None:
    """Waits for that."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


def cut(session: Session) -> None:
    """Ends the connection, as the network might."""
    channel = session._connection._channel
    if channel is not None:
        channel.detach()


class Reader:
    """Takes a task's events in a thread, tells the session that they are handled, and keeps them."""

    def __init__(self, session: Session, task: RemoteTask) -> None:
        self.events: list[dict[str, Any]] = []
        self._session, self._task = session, task
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while not self._task.done:
                if (got := self._task.recv(PATIENCE_S)) is not None:
                    self.events.append(got[0])
                    self._session.acknowledge(got[0].get("seq", 0))
        except SkyctlError:
            return

    def all(self) -> list[dict[str, Any]]:
        """Everything, once the task has ended or the session is over."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.events


def assert_without_gap(events: list[dict[str, Any]], sent: list[int] | None = None) -> None:
    """All that ``node_tasks.count`` says, each once and in order; and that it was sent all of ``said``."""
    (result,) = [event for event in events if event["event"] == "result"]
    expected = list(range(result["numbers"]))
    assert [event["number"] for event in events if event["event"] == "count"] == expected
    lines = [event["text"] for event in events if event["event"] == "log"]
    assert lines == [f"line {number}" for number in expected]
    if sent is not None:
        assert result["heard"] == sent


class Switch:
    """A connector that can be turned off."""

    def __init__(self) -> None:
        self.on = True
        self.dials = 0

    def __call__(self, node: Node, options: ConnectOptions) -> NodeConnection:
        self.dials += 1
        if not self.on:
            raise UnreachableError(f"node {node.name}: there is no route to it", node=node.name)
        return connect_node(node, options)
