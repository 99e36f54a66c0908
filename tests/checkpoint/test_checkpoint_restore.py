"""Which checkpoint a plan goes on from, with replicators that say what they are told to."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.bare_records import OF_MEASUREMENT

from skyctl.checkpoint.launcher.restore import restore_newest
from skyctl.checkpoint.node.layout import HeldShard
from skyctl.checkpoint.node.recovery import RestorePoint
from skyctl.planner.api import plan
from skyctl.records.measurement import Measurement, Quantiles
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Layer, Problem
from skyctl.run.callbacks import StepProgress
from skyctl.run.step_history import StepHistory


def made() -> Plan:
    layer = Layer(name="l", flops=1.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
    devices = tuple(Device(id=f"{n}/cpu:0", flops_per_s=1.0, memory_bytes=None) for n in "ab")
    problem = Problem(layers=(layer,) * 4, devices=devices, microbatches=4)
    return plan(problem, assign=[("a/cpu:0", 0, 2), ("b/cpu:0", 2, 4)])


def whole(step: int, layers: Collection[int], attempt: int = 1) -> dict[int, HeldShard]:
    return {layer: HeldShard(f"{step:032x}{layer:032x}", 10, attempt) for layer in layers}


class Fake:
    """``broken``: (node, step, layer) whose file is not what its manifest says."""

    def __init__(
        self, held: dict[str, dict[int, dict[int, HeldShard]]], broken: set[tuple] = frozenset()
    ) -> None:  # type: ignore[assignment]
        self.held, self.broken = held, broken
        self.brought: list[tuple[str, int]] = []
        self.pruned: set[int] = set()

    def holdings(self, *, named: bool = False) -> Any:
        return self.held

    def damaged(self, chosen: RestorePoint, used: Mapping[str, Collection[int]]) -> dict[str, dict[int, str]]:
        found: dict[str, dict[int, str]] = {}
        for node, layers in used.items():
            for layer in layers:
                if (node, chosen.step, layer) in self.broken:
                    found.setdefault(node, {})[layer] = f"layer {layer} is damaged"
        return found

    def bring(self, chosen: RestorePoint, wanted: Mapping[str, Collection[int]], *_: Any) -> Any:
        lacking: dict[str, dict[int, tuple[str, str]]] = {}
        for node, layers in wanted.items():
            for layer in layers:
                sources = chosen.layers[layer].nodes
                if node in sources:
                    continue
                if (sources[0], chosen.step, layer) in self.broken:
                    lacking.setdefault(node, {})[layer] = (sources[0], "damaged on the way")
                else:
                    self.brought.append((node, layer))
        return lacking

    def prune(self, kept: Collection[int]) -> None:
        self.pruned = set(kept)


ALL = range(4)


@pytest.mark.parametrize(
    ("held", "broken", "done", "step", "said"),
    [
        ({}, set(), 9, None, 0),
        ({"a": {5: whole(5, ALL)}, "b": {5: whole(5, ALL), 10: whole(10, (2, 3))}}, set(), 12, 5, 0),
        ({"a": {5: whole(5, ALL), 10: whole(10, (0, 1))}, "b": {10: whole(10, (2, 3))}}, set(), 12, 10, 0),
        # a damaged copy where it is needed: the other one is brought
        ({"a": {5: whole(5, ALL)}, "b": {5: whole(5, ALL)}}, {("b", 5, 2)}, 9, 5, 1),
        # damaged everywhere: the step before
        ({"a": {5: whole(5, ALL), 10: whole(10, ALL)}}, {("a", 10, 1)}, 12, 5, 1),
        ({"a": {10: whole(10, ALL)}}, {("a", 10, 3)}, 12, None, 1),
        # not beyond what is known of the losses, where there is another
        ({"a": {5: whole(5, ALL), 10: whole(10, ALL)}}, set(), 9, 5, 0),
        ({"a": {10: whole(10, ALL)}}, set(), 9, 10, 0),
    ],
)
def test_the_newest_that_is_whole(held: Any, broken: set, done: int, step: int | None, said: int) -> None:
    replicators = Fake({node: dict(steps) for node, steps in held.items()}, broken)
    warned: list[str] = []
    found = restore_newest(replicators, made(), done=done, warn=warned.append)  # type: ignore[arg-type]
    assert (found.step if found else None) == step
    assert len(warned) == said
    if step is not None:
        assert max(replicators.pruned) == step


def progress(step: int, loss: float) -> StepProgress:
    return StepProgress(step=step, steps=4, loss=loss, iteration_s=0.5, samples_per_s=1.0, left_s=None)


def test_of_a_step_that_was_done_again_the_last_counts(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [(0, 4.0), (1, 3.0), (2, 9.0), (2, 2.0)]
    metrics.write_text(
        "".join(json.dumps({"step": s, "loss": x, "iteration_s": 0.5}) + "\n" for s, x in lines) + "{half"
    )
    history = StepHistory.read(metrics)
    assert history.count == 3
    history.add(progress(3, 1.0))
    took = Quantiles(median=0.5, p10=0.5, p90=0.5)
    last = Measurement(
        run_id="r",
        strategy="even",
        steps=(),
        iteration_s=took,
        predicted_iteration_s=0.5,
        replicas=(),
        final_loss=1.0,
        attempts=1,
        weights=None,
        **OF_MEASUREMENT,
    )
    done = history.of_all(last, 2)
    assert [(one.step, one.loss) for one in done.steps] == [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]
    assert done.attempts == 2
    assert StepHistory.read(tmp_path / "none").count == 0
