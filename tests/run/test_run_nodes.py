"""Which nodes a run has lost: who is taken back by itself, and what another process finds written down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.errors import NodeError, ProtocolError, SkyctlError, UnreachableError
from skyctl.files import RunPaths
from skyctl.records.base import timestamp
from skyctl.records.run_state import RunState
from skyctl.run.event_sink import RunFolderSink
from skyctl.run.run_nodes import RunNodes


class Replanner:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.lost: dict[str, bool] = {}
        self.asked: list[str] = []
        self.given_up: dict[str, Any] = {}

    def note_lost(self, name: str, session: Any, _plan: Any, *, trusted: bool = True) -> None:
        self.lost[name] = trusted
        self.given_up |= {} if session is None else {name: session}

    def request_nodes(self, names: list[str]) -> None:
        self.asked += names


def make_sessions() -> dict[str, Any]:
    return {
        name: SimpleNamespace(
            id=f"s-{name}", hello=SimpleNamespace(cache="/c"), lost=None, disconnected_s=0.0
        )
        for name in "abc"
    }


def make(sessions: dict[str, Any], **known: Any) -> tuple[RunNodes, Replanner, RunFolderSink]:
    paths, replanner = RunPaths.new(), Replanner()
    now = timestamp()
    fixed = {"created": now, "written": now, "workload": "w", "cluster": "c", "steps": 3}
    state = RunState.model_validate({"run_id": paths.run_id, **fixed, **known})
    sink = RunFolderSink(paths, state, lambda _note: None)
    plan: Any = None
    return RunNodes(sessions, sink, replanner, plan, lambda _name: None), replanner, sink  # type: ignore[arg-type]


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
    nodes, replanner, sink = make(sessions)
    nodes.give_up_lost(("b",), error, None)  # type: ignore[arg-type]
    assert replanner.lost == {"b": trusted, "c": True}
    assert list(sessions) == ["a"]
    assert set(sink.state.lost) == {"b", "c"}
    assert sink.state.untrusted == (() if trusted else ("b",))
    assert RunState.model_validate_json(sink.state.to_json()) == sink.state


def test_who_takes_the_run_over_does_not_trust_it_either() -> None:
    sessions = make_sessions()
    known = {"lost": {"b": "it lied", "c": "it was away"}, "untrusted": ("b",)}
    nodes, replanner, sink = make(sessions, **known)
    assert replanner.asked == ["c"]
    assert replanner.lost == {"b": False}
    assert set(sessions) == {"a", "c"}
    nodes.note()
    assert sink.state.lost == {"b": "it lied"}
    assert sink.state.untrusted == ("b",)
    sessions["b"] = replanner.given_up.pop("b")  # somebody has asked for it
    nodes.update()
    assert sink.state.untrusted == ()
