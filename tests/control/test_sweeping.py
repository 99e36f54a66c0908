"""Sweeps plan the same problem again with one thing changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from skyctl.control import comparing, sweeping
from skyctl.control.comparing import Comparing
from skyctl.control.planning import PlanOptions, plan_best
from skyctl.errors import InfeasibleError, InputError
from skyctl.records.plan import WorkloadRef
from skyctl.records.problem import Device, Layer, LayerTimes, Problem

REF = WorkloadRef(source="x", digest="0", batch_size=32, dtype="float32", seed=0)
SPEEDS = {"slow": 1.0, "fast": 4.0, "middle": 2.0}


def problem(microbatches: int, nodes) -> Problem:
    """Six layers; a microbatch costs its share of the batch and a little more."""
    one_s = 8.0 / microbatches + 0.05
    times = {
        f"{node}/cpu:0": LayerTimes(
            forward_s=[one_s / SPEEDS[node]] * 6,
            backward_s=[2 * one_s / SPEEDS[node]] * 6,
            optimizer_s=[0.0] * 6,
        )
        for node in nodes
    }
    layer = {"flops": 3.0, "state_bytes": 1.0, "activation_bytes": 1.0, "output_bytes": 1.0}
    return Problem(
        layers=[Layer(name=f"l{i}", **layer) for i in range(6)],
        devices=[Device(id=device, flops_per_s=1.0, memory_bytes=None) for device in times],
        times=times,
        microbatches=microbatches,
    )


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Comparing:
    def plan_profile(_profile, options, _ref):
        if options.microbatches == 1:
            raise InfeasibleError("too small")
        made = problem(options.microbatches or 8, options.only_nodes)
        return plan_best([made], PlanOptions(options.strategy, time_limit_s=5.0))

    monkeypatch.setattr(comparing, "plan_profile", plan_profile)
    request = SimpleNamespace(ref=lambda _workload: REF)
    return Comparing(None, request, None, PlanOptions(only_nodes=list(SPEEDS), schedule="1f1b"))  # type: ignore[arg-type]


def test_the_best_number_is_what_is_compared(job: Comparing) -> None:
    said: list[str] = []
    outcomes, sweep = sweeping.sweep_microbatches(job, None, (1, 2, 8, 32), said.append)  # type: ignore[arg-type]
    assert [point.value for point in sweep.points] == [1, 2, 8, 32]
    assert [cell.status for cell in sweep.points[0].cells] == ["infeasible"] * 3
    best = min(sweep.line("optimal"), key=lambda one: one[1])[0]
    assert sweep.chosen == sweep.points[best].value
    assert all(o.plan is not None and o.plan.problem.microbatches == sweep.chosen for o in outcomes)
    assert len(said) >= 4


def test_where_nothing_fits_anywhere(job: Comparing) -> None:
    with pytest.raises(InfeasibleError, match="no strategy gives a plan"):
        sweeping.sweep_microbatches(job, None, (1,), lambda _text: None)  # type: ignore[arg-type]


def test_nodes_come_by_speed(job: Comparing) -> None:
    outcomes = job.plans(None)  # type: ignore[arg-type]
    assert sweeping.by_speed(outcomes) == ["fast", "middle", "slow"]
    assert sweeping.by_speed(outcomes, ["slow"]) == ["slow", "fast", "middle"]
    sweep = sweeping.sweep_nodes(job, None, outcomes, (1, 2, 3), lambda _text: None)  # type: ignore[arg-type]
    assert [point.nodes for point in sweep.points] == [
        ("fast",),
        ("fast", "middle"),
        ("fast", "middle", "slow"),
    ]
    assert [point.added for point in sweep.points] == [None, "middle", "slow"]
    steps = [seconds for _, seconds in sweep.line("optimal")]
    assert steps == sorted(steps, reverse=True)
    assert sweep.chosen == 3
    with pytest.raises(InputError, match="3 nodes were measured"):
        sweeping.sweep_nodes(job, None, outcomes, (4,), lambda _text: None)  # type: ignore[arg-type]
