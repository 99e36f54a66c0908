"""Two ranks as the launcher has them, one of them on a node that lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyctl.errors import NodeError
from skyctl.files import RunPaths
from skyctl.records.base import timestamp
from skyctl.records.cluster import Node
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem
from skyctl.records.run_state import RunState
from skyctl.run.attempt_state import AttemptState
from skyctl.run.journal import FolderJournal
from skyctl.run.rank_spec import RankSpec, rank_task_name

from ..helpers.orders import rank_order
from . import lies

NODES = {name: Node(name=name, transport="local") for name in (lies.HONEST, lies.LIAR)}


STATE_BYTES = 1e5


LIMIT = 10_000


SEED = 20261123


def make_plan() -> Plan:
    """Two stages of two layers, the second on the node that lies."""
    from skyctl.planner.api import plan

    ids = [f"{name}/cpu:0" for name in NODES]
    problem = Problem(
        layers=tuple(
            Layer(name=f"l{i}", flops=1e9, state_bytes=STATE_BYTES, activation_bytes=1e3, output_bytes=1e3)
            for i in range(4)
        ),
        devices=tuple(Device(id=name, flops_per_s=1e9, memory_bytes=None) for name in ids),
        times={
            name: LayerTimes(forward_s=(0.1,) * 4, backward_s=(0.1,) * 4, optimizer_s=(0.0,) * 4)
            for name in ids
        },
        links=tuple(
            Link(source=a, target=b, latency_s=1e-4, bandwidth_bytes_per_s=1e7) for a, b in (ids, ids[::-1])
        ),
        microbatches=4,
    )
    made = plan(problem, strategy="even")
    assert [stage.replicas[0].device for stage in made.stages] == ids
    return made


def run_state(paths: RunPaths) -> RunState:
    now = timestamp()
    return RunState(
        run_id=paths.run_id, created=now, written=now, workload="w", cluster="c", steps=lies.STEPS
    )


def rank_spec(rank: int) -> RankSpec:
    node, layers = list(NODES)[rank], [2 * rank, 2 * rank + 2]
    order = rank_order(rank, len(NODES), steps=lies.STEPS, layers=layers, microbatches=4)
    return RankSpec(rank, node, f"{node}/cpu:0", order, dict.fromkeys(range(*layers), LIMIT))


def names_the_liar(exc: NodeError) -> bool:
    """Whether the error names it, and is of a size that a person reads."""
    return exc.node == lies.LIAR and lies.LIAR in exc.message and len(exc.message) < 1000


class Ranks:
    """Two ranks as the launcher has them once they were started; what is said is handled at once."""

    def __init__(self) -> None:
        self.specs = [rank_spec(0), rank_spec(1)]
        paths = RunPaths.new()
        self.journal = FolderJournal(paths, run_state(paths), lambda _text: None)
        self.kept: list[Mapping[str, Any]] = []
        self.state = AttemptState(self.specs, NODES)
        self.ranks = self.state.ranks

    def say(self, rank: int, *messages: Mapping[str, Any]) -> None:
        for message in messages:
            read = self.state.read(rank, dict(message))
            if read is None:
                continue
            self.kept.append(json.loads(json.dumps(read.plain)))
            if not self.journal.heard(self.specs[rank].node, rank_task_name(rank), read.plain):
                continue
            event = self.state.accept(rank, read.event)
            if event is not None:
                list(self.state.report(rank, event))


def honest_events() -> list[lies.Message]:
    """The messages of the first rank."""
    listening = {"event": "listening", "address": "192.0.2.1", "port": 4000}
    checkpoint = {**lies.CHECKPOINT, "layers": {str(n): {"sha256": lies.SHA, "bytes": 1000} for n in (0, 1)}}
    found = [checkpoint if one is lies.CHECKPOINT else one for one in lies.RANK[:-2]]
    return [found[0], listening, *(one for one in found[1:] if one["event"] != "validation")]
