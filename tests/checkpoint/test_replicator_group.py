"""Checkpoint replicators as the launcher talks to them: nobody waits for one on a node that is not heard."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.checkpoint.launcher.replicator_group import ReplicatorGroup
from skyctl.checkpoint.node.layout import HeldShard
from skyctl.checkpoint.node.recovery import newest_restore_point
from skyctl.errors import NodeError
from skyctl.records.cluster import Node
from skyctl.run.restart_policy import classify

FAR_S = 30.0
"""The least time that a test would last if it waited for a silent node."""


class FakeTask:
    """A replicator that says where it listens and answers, unless its node is silent from the start."""

    ended = False

    def __init__(self, *, silent: bool) -> None:
        self.answers = not silent
        self.unwritable: str | None = None
        self.told: list[dict[str, Any]] = []
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        if not silent:
            self._said.put({"event": "listening", "address": "127.0.0.1", "port": 1, "pinned": []})

    def recv(self, _timeout_s: float | None = None) -> tuple[dict[str, Any], bytes] | None:
        said = self._said.get()
        return None if said is None else (said, b"")

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)
        if "id" in message and self.answers:
            failed = {} if self.unwritable is None else {"0": self.unwritable}
            said = {"steps": {}, "failed": failed, "unwritable": self.unwritable}
            self._said.put({"event": "answer", "id": message["id"], **said})

    def kill(self) -> None:
        self.ended = True
        self._said.put(None)


class FakeSession:
    """A node's session; ``is_waited_for`` as a silent node's, or not."""

    def __init__(self, name: str, *, silent: bool = False) -> None:
        self.node = Node(name=name, transport="local")
        self.hello = SimpleNamespace(cache=str(Path("/cache")))
        self.is_waited_for = not silent
        self.tasks: list[FakeTask] = []

    def start_task(self, *_: Any, **__: Any) -> FakeTask:
        self.tasks.append(FakeTask(silent=not self.is_waited_for))
        return self.tasks[-1]

    def discard(self, _task: Any) -> None:
        pass


def started(*sessions: FakeSession) -> tuple[ReplicatorGroup, list[tuple[str, Any]]]:
    said: list[tuple[str, Any]] = []
    by_name: Any = {session.node.name: session for session in sessions}
    group = ReplicatorGroup(
        "run", by_name, on_news=lambda node, news: said.append((node, news)), shard_limits={}
    )
    group.start(dict.fromkeys(by_name, "127.0.0.1"))
    return group, said


def test_a_node_that_is_not_heard_holds_nobody_up() -> None:
    """Not at the end of a run, nor where the others are to be told whom to follow."""
    group, said = started(FakeSession("oak"), FakeSession("elm", silent=True))
    began = time.monotonic()
    while not group.nodes:
        group.take_events()
        assert time.monotonic() - began < FAR_S
    assert not group.starting
    group.wait_ready()
    ((node, news),) = said
    assert node == "elm"
    assert news.error.message == "it is not heard"
    assert group.nodes == ["oak"]
    assert group.forget() == {}
    group.close()
    assert time.monotonic() - began < FAR_S


def test_nobody_follows_a_node_that_writes_no_checkpoints() -> None:
    """A helper, say: when its node is gone there is nothing of it that is not copied."""
    sessions = {name: FakeSession(name) for name in ("oak", "elm", "helper")}
    group, _ = started(*sessions.values())
    group.wait_ready()
    group.follow(sessions, ["oak", "elm"], 2, 2)
    followed = {
        name: [peer["node"] for peer in session.tasks[0].told[-1]["peers"]]
        for name, session in sessions.items()
    }
    assert followed == {"oak": ["elm"], "elm": ["oak"], "helper": ["oak", "elm"]}
    group.close()


def test_a_full_disk_is_its_own_nodes_fault_and_not_that_of_the_copies() -> None:
    oak, elm = FakeSession("oak"), FakeSession("elm")
    group, _ = started(oak, elm)
    group.wait_ready()
    elm.tasks[0].unwritable = "step-00000005/layer can't be written: No space left on device"
    point = newest_restore_point({"oak": {5: {0: HeldShard("a" * 64, 10, 1)}}}, 1)
    assert point is not None
    with pytest.raises(NodeError, match=r"node elm can't keep the checkpoint .* No space left") as found:
        group.bring(point, {"elm": {0}})
    assert classify(found.value, None).lost == ("elm",)
    group.close()


@pytest.mark.parametrize("limit_s", [FAR_S])
def test_what_was_asked_of_a_node_that_falls_silent_has_no_answer(limit_s: float) -> None:
    oak, elm = FakeSession("oak"), FakeSession("elm")
    group, _ = started(oak, elm)
    group.wait_ready()
    assert sorted(group.nodes) == ["elm", "oak"]
    elm.tasks[0].answers = elm.is_waited_for = False
    began = time.monotonic()
    assert set(group.holdings(limit_s)) == {"oak"}
    failures = group.forget(limit_s)
    assert {name: error.message for name, error in failures.items()} == {"elm": "node elm is not heard"}
    group.close()
    assert time.monotonic() - began < limit_s
