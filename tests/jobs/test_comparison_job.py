"""A comparison's rows answer the same problem; its sweeps plan it again with one thing changed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.helpers.bare_records import OF_MEASUREMENT

from skyctl.cli.show_comparison import _choice
from skyctl.compare.conclusion import conclude, describe_conclusion
from skyctl.compare.outcome import StrategyOutcome, summarize_outcomes
from skyctl.compare.sweeps import nodes_sweep
from skyctl.errors import InfeasibleError, InputError
from skyctl.jobs import comparison_job, comparison_sweeps
from skyctl.jobs.comparison_job import ComparisonJob
from skyctl.planning.plan_creation import plan_best
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.measurement import Measurement, Quantiles, StepMeasurement
from skyctl.records.plan import WorkloadRef
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem
from skyctl.records.rhythm import Rhythm

REF = WorkloadRef(source="x", digest="0", batch_size=32, dtype="float32", seed=0)
SPEEDS = {"slow": 1.0, "fast": 4.0, "middle": 2.0}


def problem(microbatches: int, nodes, rate: float = 0.0, memory_bytes: float | None = None) -> Problem:
    """Six layers; a microbatch costs its share of the batch and a bit more. ``rate``: of links, bytes/s."""
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
    pairs = [(a, b) for a in times for b in times if a != b]
    return Problem(
        layers=[Layer(name=f"l{i}", **layer) for i in range(6)],
        devices=[Device(id=device, flops_per_s=1.0, memory_bytes=memory_bytes) for device in times],
        links=[
            Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=rate)
            for a, b in (pairs if rate else ())
        ],
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
    return ComparisonJob(
        None, request, SimpleNamespace(digest="0"), PlanOptions(only_nodes=list(SPEEDS), schedule="1f1b")
    )  # type: ignore[arg-type]


def test_the_best_number_is_what_is_compared(job: ComparisonJob) -> None:
    said: list[str] = []
    outcomes, sweep = comparison_sweeps.sweep_microbatches(job, None, (1, 2, 8, 32), said.append)  # type: ignore[arg-type]
    assert [point.value for point in sweep.points] == [1, 2, 8, 32]
    assert [cell.status for cell in sweep.points[0].cells] == ["infeasible"] * 4
    best = min(sweep.line("optimal"), key=lambda one: one[1])[0]
    assert sweep.chosen == sweep.points[best].value
    assert all(o.plan is not None and o.plan.problem.microbatches == sweep.chosen for o in outcomes)
    assert len(said) >= 4


def test_where_nothing_fits_anywhere(job: ComparisonJob) -> None:
    with pytest.raises(InfeasibleError, match="no strategy gives a plan"):
        comparison_sweeps.sweep_microbatches(job, None, (1,), lambda _text: None)  # type: ignore[arg-type]


def test_nodes_come_by_speed(job: ComparisonJob) -> None:
    outcomes = job.plans(None)  # type: ignore[arg-type]
    assert comparison_sweeps.nodes_by_speed(outcomes) == ["fast", "middle", "slow"]
    assert comparison_sweeps.nodes_by_speed(outcomes, ["slow"]) == ["slow", "fast", "middle"]
    points = comparison_sweeps.plan_nodes(job, None, outcomes, (1, 2, 3), lambda _text: None)  # type: ignore[arg-type]
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
        comparison_sweeps.plan_nodes(job, None, outcomes, (4,), lambda _text: None)  # type: ignore[arg-type]


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


@pytest.fixture
def measured_numbers(monkeypatch: pytest.MonkeyPatch):
    """Profiles with these numbers of microbatches; figures as in ``problem``."""

    def put(*numbers: int, nodes=tuple(SPEEDS), **more) -> None:
        def plan_profile(_profile, options, _ref):
            wanted = numbers if options.microbatches is None else [options.microbatches]
            made = [problem(m, options.only_nodes or nodes, **more) for m in wanted]
            return plan_best(made, replace(options, time_limit_s=5.0))

        monkeypatch.setattr(comparison_job, "plan_profile", plan_profile)

    return put


def test_alone_takes_the_number_of_microbatches_that_suits_it(measured_numbers) -> None:
    """Fewer, larger microbatches cost less by themselves; only a pipeline gains by many."""
    measured_numbers(4, 16)
    for options in (PlanOptions(), PlanOptions(microbatches=16)):
        outcomes = comparison_job.plan_strategies(None, options, REF)  # type: ignore[arg-type]
        even, alone, _, optimal = outcomes
        assert alone.plan.stages[0].replicas[0].device == "fast/cpu:0"
        assert alone.plan.problem.microbatches == 4
        assert even.plan.problem == optimal.plan.problem
        assert optimal.plan.problem.microbatches == 16
        assert _choice(outcomes)[0].endswith("16 microbatches; alone: 4 microbatches")
    row = summarize_outcomes(outcomes)[1]
    assert row.label == "alone (fast)"
    assert conclude(outcomes).best == "optimal"


def test_two_machines_of_which_one_is_best_alone(measured_numbers) -> None:
    """A slow link between unequal machines: the optimal plan is the fast one's, run once, and said first."""
    measured_numbers(4, 8, nodes=("fast", "slow"), rate=0.5)
    outcomes = comparison_job.plan_strategies(None, PlanOptions(), REF)  # type: ignore[arg-type]
    ran = []

    def run(name, plan):
        ran.append(name)
        took_s = 1.02 * plan.predicted.iteration_s
        return Measurement(
            run_id=name,
            strategy=plan.strategy,
            steps=[StepMeasurement(step=i, loss=1.0, iteration_s=took_s) for i in range(4)],
            iteration_s=Quantiles(median=took_s, p10=0.99 * took_s, p90=1.01 * took_s),
            predicted_iteration_s=plan.predicted.iteration_s,
            replicas=[],
            final_loss=1.0,
            attempts=1,
            weights=None,
            **OF_MEASUREMENT,
        )

    measured = comparison_job.measure_strategies(outcomes, run)
    assert ran == ["even", "alone"]  # heuristic and optimal come to the same plan
    assert [o.measurement.strategy for o in measured] == ["even", "alone", "heuristic", "optimal"]
    found = conclude(measured)
    assert found.alone_is_best
    text = describe_conclusion(found, summarize_outcomes(measured))
    assert text.startswith("fast alone is best: heuristic and optimal leave all other devices unused; ")
    assert text.count("as fast as even, measured") == 1


def test_where_no_device_holds_the_model_alone_says_why(measured_numbers) -> None:
    measured_numbers(8, memory_bytes=9.0)
    outcomes = comparison_job.plan_strategies(None, PlanOptions(), REF)  # type: ignore[arg-type]
    row = summarize_outcomes(outcomes)[1]
    assert row.status == "infeasible"
    assert row.why_no_plan.startswith("infeasible: no device can train alone: that gives")
    assert outcomes[3].plan is not None


def test_every_number_of_nodes_is_run_once(job: ComparisonJob) -> None:
    planned = job.plans(None)  # type: ignore[arg-type]
    points = comparison_sweeps.plan_nodes(job, None, planned, (1, 2, 3), lambda _text: None)  # type: ignore[arg-type]
    asked = []

    def measure(outcomes):
        asked.extend(o.strategy for o in outcomes)
        return [replace(outcomes[0], error="rank 0 died"), *outcomes[1:]]

    done = comparison_sweeps.measure_nodes(points, planned, planned, measure)
    assert asked == ["optimal, 1 node", "optimal, 2 nodes"]
    assert [point.outcomes[-1].strategy for point in done] == ["optimal"] * 3
    assert done[0].outcomes[-1].error == "rank 0 died"
    assert done[2].outcomes is planned
    assert [cell.error for cell in nodes_sweep(done, 3).points[0].cells] == [None, None, None, "rank 0 died"]


def test_the_chosen_way_to_sum_is_the_comparisons_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two others are planned for the same number of microbatches; one device alone sums nothing."""
    asked: list[PlanOptions] = []

    def plan_profile(_profile, options, _ref):
        asked.append(options)
        made = problem(8, SPEEDS, rate=2.0).model_copy(update={"parallel": "data"})
        return plan_best([made], PlanOptions(options.strategy, sync=options.sync, time_limit_s=5.0))

    monkeypatch.setattr(comparison_job, "plan_profile", plan_profile)
    request = SimpleNamespace(ref=lambda _workload: REF)
    whole = ComparisonJob(None, request, SimpleNamespace(digest="0"), PlanOptions(parallel="data"))  # type: ignore[arg-type]
    own = StrategyOutcome("optimal", plan_profile(None, PlanOptions(sync="star"), REF))
    asked.clear()
    rows = whole.syncs(None, [own])  # type: ignore[arg-type]
    assert [(row.sync, row.chosen) for row in rows] == [("ring", False), ("star", True), ("trees", False)]
    assert [(options.sync, options.microbatches) for options in asked] == [("ring", 8), ("trees", 8)]
    assert all(row.predicted_s for row in rows)
    alone = StrategyOutcome("alone", plan_profile(None, PlanOptions("alone"), REF))
    assert whole.syncs(None, [own, alone]) == []  # type: ignore[arg-type]


def test_a_parameter_server_has_no_other_way_than_a_star(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_profile(_profile, options, _ref):
        made = problem(8, SPEEDS, rate=1e3).model_copy(
            update={"parallel": "data", "rhythm": Rhythm(staleness=2), "sync": options.sync or "auto"}
        )
        return plan_best([made], PlanOptions(options.strategy, time_limit_s=5.0))

    monkeypatch.setattr(comparison_job, "plan_profile", plan_profile)
    request = SimpleNamespace(ref=lambda _workload: REF)
    whole = ComparisonJob(None, request, SimpleNamespace(digest="0"), PlanOptions(parallel="data"))  # type: ignore[arg-type]
    own = StrategyOutcome("optimal", plan_profile(None, PlanOptions(), REF))
    assert own.plan.sync is not None
    assert whole.syncs(None, [own]) == []  # type: ignore[arg-type]
