"""A comparison's rows answer the same problem; its sweeps plan it again with one thing changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from skyctl.cli.show_comparison import _choice
from skyctl.compare.sweeps import nodes_sweep
from skyctl.control import comparison_job
from skyctl.control.comparison_job import ComparisonJob
from skyctl.control.plan_creation import PlanOptions, plan_best
from skyctl.errors import InfeasibleError, InputError
from skyctl.records.plan import WorkloadRef
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem

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
def job(monkeypatch: pytest.MonkeyPatch) -> ComparisonJob:
    def plan_profile(_profile, options, _ref):
        if options.microbatches == 1:
            raise InfeasibleError("too small")
        made = problem(options.microbatches or 8, options.only_nodes)
        return plan_best([made], PlanOptions(options.strategy, time_limit_s=5.0))

    monkeypatch.setattr(comparison_job, "plan_profile", plan_profile)
    request = SimpleNamespace(ref=lambda _workload: REF)
    return ComparisonJob(None, request, None, PlanOptions(only_nodes=list(SPEEDS), schedule="1f1b"))  # type: ignore[arg-type]


def test_the_best_number_is_what_is_compared(job: ComparisonJob) -> None:
    said: list[str] = []
    outcomes, sweep = comparison_job.sweep_microbatches(job, None, (1, 2, 8, 32), said.append)  # type: ignore[arg-type]
    assert [point.value for point in sweep.points] == [1, 2, 8, 32]
    assert [cell.status for cell in sweep.points[0].cells] == ["infeasible"] * 4
    best = min(sweep.line("optimal"), key=lambda one: one[1])[0]
    assert sweep.chosen == sweep.points[best].value
    assert all(o.plan is not None and o.plan.problem.microbatches == sweep.chosen for o in outcomes)
    assert len(said) >= 4


def test_where_nothing_fits_anywhere(job: ComparisonJob) -> None:
    with pytest.raises(InfeasibleError, match="no strategy gives a plan"):
        comparison_job.sweep_microbatches(job, None, (1,), lambda _text: None)  # type: ignore[arg-type]


def test_nodes_come_by_speed(job: ComparisonJob) -> None:
    outcomes = job.plans(None)  # type: ignore[arg-type]
    assert comparison_job.nodes_by_speed(outcomes) == ["fast", "middle", "slow"]
    assert comparison_job.nodes_by_speed(outcomes, ["slow"]) == ["slow", "fast", "middle"]
    points = comparison_job.plan_nodes(job, None, outcomes, (1, 2, 3), lambda _text: None)  # type: ignore[arg-type]
    sweep = nodes_sweep(points, 3)
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
        comparison_job.plan_nodes(job, None, outcomes, (4,), lambda _text: None)  # type: ignore[arg-type]


def test_all_rows_take_the_best_ones_choice(monkeypatch):
    ids = ("a/cpu:0", "b/cpu:0")
    given = Problem(
        layers=tuple(
            Layer(name=f"l{i}", flops=3.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
            for i in range(6)
        ),
        devices=tuple(Device(id=i, flops_per_s=1.0 + n, memory_bytes=None) for n, i in enumerate(ids)),
        links=tuple(
            Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=0.15) for a, b in (ids, ids[::-1])
        ),
        microbatches=8,
    )
    asked = []

    def plan_profile(profile, options, ref):
        asked.append(options.schedule)
        if options.schedule in (None, "auto"):
            return plan_best([given], PlanOptions(options.strategy, schedule="auto", time_limit_s=5.0))
        fixed = given.model_copy(update={"schedule": options.schedule})
        return plan_best([fixed], PlanOptions(options.strategy, time_limit_s=5.0))

    monkeypatch.setattr(comparison_job, "plan_profile", plan_profile)
    outcomes = comparison_job.plan_strategies(None, PlanOptions(), REF)
    problems = [outcome.plan.problem for outcome in outcomes]
    assert problems[0] == problems[2] == problems[3]
    assert problems[0].schedule in asked or asked == [None, "1f1b", None, None]
    assert problems[1].schedule == "1f1b"  # alone: one stage needs no other
    assert _choice(outcomes) == [f"every row: {problems[0].schedule}, 8 microbatches"]
