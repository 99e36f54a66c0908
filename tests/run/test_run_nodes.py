"""Which nodes a run has lost: who is taken back by itself, and what another process finds written down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.errors import NodeError, ProtocolError, SkyctlError, UnreachableError
from skyctl.files import RunPaths
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster, Node
from skyctl.records.run_state import RunState
from skyctl.run.journal import FolderJournal
from skyctl.run.live_run import LiveRun
from skyctl.run.run_nodes import RunNodes

CLUSTER = Cluster(name="c", nodes=tuple(Node(name=name, transport="local") for name in "abc"))
PLAN: Any = SimpleNamespace(problem=None)


def make_sessions() -> dict[str, Any]:
    return {
        name: SimpleNamespace(
            id=f"s-{name}",
            hello=SimpleNamespace(cache="/c"),
            lost=None,
            disconnected_s=0.0,
            has_answered=lambda _s: True,
        )
        for name in "abc"
    }


def make(sessions: dict[str, Any], **known: Any) -> tuple[RunNodes, FolderJournal]:
    paths = RunPaths.new()
    now = timestamp()
    fixed = {"created": now, "written": now, "workload": "w", "cluster": "c", "steps": 3}
    state = RunState.model_validate({"run_id": paths.run_id, **fixed, **known})
    journal = FolderJournal(paths, state, lambda _note: None)
    checkpoints: Any = SimpleNamespace(drop=lambda _name: None)
    run = LiveRun(journal, CLUSTER, sessions)
    return RunNodes(run, checkpoints, PLAN), journal


@pytest.mark.parametrize(
    ("error", "trusted"),
    [
        (UnreachableError("node b was lost", node="b"), True),
        (NodeError("node b has not been heard", node="b"), True),
        (ProtocolError("node b sent 'sing'", node="b"), False),
    ],
)
def test_only_one_that_lied_is_not_trusted(error: SkyctlError, trusted: bool) -> None:
    sessions = make_sessions()
    sessions["c"].lost = UnreachableError("node c was lost", node="c")
    nodes, journal = make(sessions)
    nodes.give_up_lost(("b",), error, PLAN)
    assert {name: node.trusted for name, node in nodes.lost.items()} == {"b": trusted, "c": True}
    assert list(sessions) == ["a"]
    assert set(journal.state.lost) == {"b", "c"}
    assert journal.state.untrusted == (() if trusted else ("b",))
    assert RunState.model_validate_json(journal.state.to_json()) == journal.state


def test_who_takes_the_run_over_does_not_trust_it_either() -> None:
    sessions = make_sessions()
    known = {"lost": {"b": "it lied", "c": "it was away"}, "untrusted": ("b",)}
    nodes, journal = make(sessions, **known)
    assert nodes.returned == ["c"]
    assert {name: node.trusted for name, node in nodes.lost.items()} == {"b": False}
    assert set(sessions) == {"a", "c"}
    nodes.note()
    assert journal.state.lost == {"b": "it lied"}
    assert journal.state.untrusted == ("b",)
    back = nodes.lost["b"].session
    assert back is not None
    assert nodes.take_in("b", back)  # somebody has asked for it
    nodes.update()
    assert journal.state.untrusted == ()
