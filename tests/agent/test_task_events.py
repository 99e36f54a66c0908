"""Messages of nodes as records: what is read, and what is refused with node and field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyctl.agent.task_events import LogEvent, read_event, to_message
from skyctl.checkpoint.node.replicator_events import LayersReplicated, ReplicatorListening, ShardDigest
from skyctl.errors import ProtocolError
from skyctl.worker.rank_events import (
    CheckpointEvent,
    ReadyEvent,
    StepEvent,
    SumSizes,
    ValidationEvent,
)

from ..helpers.events import step_event

SHA256 = "ab" * 32
VALIDATED = {"event": "validation", "step": 4, "loss": 0.5, "wall_s": 0.1}


def over_the_wire(message: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(message))


@pytest.mark.parametrize(
    "event",
    [
        LogEvent("a line"),
        step_event(3, grad_norm=1.5, peak_memory_bytes=2**30),
        CheckpointEvent(20, {0: ShardDigest(SHA256, 10), 7: ShardDigest(SHA256, 20)}, 0.5, ("a note",)),
        CheckpointEvent(20, {}, 0.5, error="the disk is full"),
        ReadyEvent(SumSizes((7_000_000_000, 5), 200, 0)),
        ValidationEvent(4, 0.5, 0.1),
        ValidationEvent(4, 0.5, 0.1, {"accuracy": 0.5, "f1/macro": None}),
        LayersReplicated(20, 1, "b", {3: ShardDigest(SHA256, 10)}, 10, 0.1),
        ReplicatorListening("192.0.2.1", 4000, (10, 20)),
    ],
)
def test_what_a_node_sends_is_what_the_launcher_reads(event: Any) -> None:
    assert read_event(type(event), over_the_wire(to_message(event)), "b") == event


def test_what_is_not_known_is_left_out() -> None:
    assert read_event(LogEvent, {"event": "log", "text": "x", "seq": 7}, "b") == LogEvent("x")


@pytest.mark.parametrize(
    ("cls", "message", "words"),
    [
        (LogEvent, {"event": "log"}, "node b sent 'log' with no text"),
        (LogEvent, {"event": "log", "text": 7}, "node b sent 'log' with text: 7 is no str"),
        (StepEvent, to_message(step_event(3)) | {"iteration_s": "soon"}, "iteration_s: 'soon' is no number"),
        (StepEvent, to_message(step_event(3)) | {"step": True}, "step: True is no int"),
        (ValidationEvent, VALIDATED | {"metrics": {"a\x1b[2J": 0.5}}, "metrics: .* is not of the form"),
        (ValidationEvent, VALIDATED | {"metrics": {"a": "0.5"}}, "metrics: .0.5. is no number"),
        (ValidationEvent, VALIDATED | {"metrics": {"a": float("nan")}}, "metrics: nan is no number"),
        (ValidationEvent, VALIDATED | {"metrics": dict.fromkeys(map(str, range(17)), 0)}, "17 items"),
        (
            CheckpointEvent,
            {"event": "checkpoint", "step": 1, "wall_s": 0, "layers": []},
            "layers: list is no dict",
        ),
        (
            CheckpointEvent,
            {"event": "checkpoint", "step": 1, "wall_s": 0, "layers": {"0": {"sha256": SHA256}}},
            "layers: no bytes",
        ),
        (
            CheckpointEvent,
            {"event": "checkpoint", "step": 1, "wall_s": 0, "layers": {"x": {}}},
            "layers: 'x' is no number",
        ),
    ],
)
def test_a_wrong_message_is_refused_with_its_node_and_field(cls: Any, message: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read_event(cls, message, "b")
