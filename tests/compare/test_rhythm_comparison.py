"""A comparison of a rhythm: beside the synchronous plan, for the samples of one step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.helpers.bare_records import OF_MEASUREMENT
from tests.learning.profiles import device, profile

from skyctl.cli.show_comparison import _choice, _same_plans
from skyctl.compare.comparison import Comparison, ProgressTable
from skyctl.compare.conclusion import compare_plans, conclude, describe_conclusion, is_same_plan
from skyctl.compare.outcome import StrategyOutcome, pipeline_problem, summarize_outcomes
from skyctl.compare.report_page import render_report
from skyctl.compare.sweeps import nodes_sweep, sweep_table
from skyctl.jobs.comparison_job import ComparisonJob
from skyctl.jobs.comparison_sweeps import plan_nodes
from skyctl.planner.drawn_steps import long_run_step_s
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.base import parse
from skyctl.records.measurement import Measurement, StepMeasurement, quantiles
from skyctl.records.plan import WorkloadRef
from skyctl.records.profile import LinkProfile, Observation, Profile
from skyctl.records.rhythm import Rhythm

REF = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
ROWS = ["even", "alone", "heuristic", "pipeline", "synchronous", "optimal"]
SPEEDS = {"a": 1.0, "b": 1.25}
STALLS = (1.0,) * 18 + (10.0,) * 2
"""Of a device's steps: one in ten takes ten times as long."""


def measured(rate: float = 2e7, *, stalls: Sequence[float] = ()) -> Profile:
    """Two devices over links of ``rate`` bytes a second; ``stalls``: how uneven a run saw their steps."""
    names = list(SPEEDS)
    links = tuple(
        LinkProfile(source=s, target=t, latency_s=0.001, bandwidth_bytes_per_s=rate)
        for s, t in (names, names[::-1])
    )
    base = profile(*(device(name, speed) for name, speed in SPEEDS.items()), links=links)
    seen = tuple(
        Observation(
            run_id="r",
            seen="2026-01-02T00:00:00Z",
            steps=40,
            spread=1.0,
            device=f"{name}/cpu:0",
            digest="w",
            microbatch_size=2,
            layers=(0, 6),
            probed_s=1.0,
            seen_s=1.0,
            step_factors=tuple(stalls),
        )
        for name in names
        if stalls
    )
    return base.model_copy(update={"observations": seen})


def job(rhythm: Rhythm, form: Any = "data", owners: Any = None) -> ComparisonJob:
    request: Any = SimpleNamespace(ref=lambda _digest: REF)
    loaded: Any = SimpleNamespace(digest="w")
    cluster: Any = None
    options = PlanOptions(parallel=form, rhythm=rhythm, owners=owners, time_limit_s=5.0)
    strategies = ("even", "alone", "heuristic", "optimal") if owners is None else ("even", "optimal")
    other_form = form == "data" and owners is None
    return ComparisonJob(cluster, request, loaded, options, strategies, other_form=other_form)


def ran(plan: Any, steps_s: Sequence[float], mean_s: float | None = None) -> Measurement:
    """A run whose steps took that after the first."""
    return Measurement(
        run_id=f"run-{plan.strategy}-{plan.problem.rhythm.is_synchronous}",
        strategy=plan.strategy,
        steps=[StepMeasurement(step=i, loss=2.0, iteration_s=s) for i, s in enumerate([9.0, *steps_s])],
        iteration_s=quantiles(steps_s),
        predicted_iteration_s=plan.predicted.iteration_s,
        replicas=[],
        final_loss=2.0,
        attempts=1,
        weights=None,
        sync_s=0.4,
        mean_iteration_s=mean_s,
        **OF_MEASUREMENT,
    )


def by_name(outcomes: Sequence[StrategyOutcome]) -> dict[str, Any]:
    assert all(outcome.plan is not None for outcome in outcomes), [outcome.error for outcome in outcomes]
    return {outcome.strategy: outcome.plan for outcome in outcomes}


def test_a_delay_stands_beside_the_run_without_it() -> None:
    outcomes = job(Rhythm(delay=1)).plans(measured())
    assert [outcome.strategy for outcome in outcomes] == ROWS
    plans = by_name(outcomes)
    plain = plans["synchronous"].problem
    assert (plain.parallel, plain.rhythm) == ("data", Rhythm())
    assert plans["alone"].problem.rhythm.is_synchronous
    assert plans["optimal"].problem.rhythm.delay == 1
    gain = conclude(outcomes).over("synchronous")
    assert gain is not None
    assert gain.faster
    ratio = plans["synchronous"].predicted.iteration_s / plans["optimal"].predicted.iteration_s
    assert gain.ratio == pytest.approx(ratio)
    text = describe_conclusion(conclude(outcomes), summarize_outcomes(outcomes))
    assert f"{ratio:.2f}× as fast as synchronous, predicted" in text
    assert pipeline_problem(outcomes[3:]) == plans["optimal"].problem


def test_the_same_pipelines_in_another_rhythm_are_another_plan() -> None:
    """One run would have measured both."""
    plan = by_name(job(Rhythm(delay=1)).plans(measured()))["optimal"]
    assert len(plan.pipelines) == 2
    plain = plan.model_copy(update={"problem": plan.problem.model_copy(update={"rhythm": Rhythm()})})
    delayed, other = StrategyOutcome("optimal", plan), StrategyOutcome("synchronous", plain)
    assert not is_same_plan(delayed, other)
    alone = by_name(job(Rhythm(delay=1)).plans(measured()))["alone"]
    delayed = alone.model_copy(
        update={"problem": alone.problem.model_copy(update={"rhythm": Rhythm(delay=1)})}
    )
    assert is_same_plan(StrategyOutcome("alone", alone), StrategyOutcome("optimal", delayed))


def test_with_all_forms_it_is_of_the_form_that_was_taken() -> None:
    outcomes = job(Rhythm(delay=1), "auto").plans(measured())
    names = [outcome.strategy for outcome in outcomes]
    assert names[-2:] == ["synchronous", "optimal"]
    assert {"pipeline", "data", "hybrid"} <= set(names)
    plans = by_name(outcomes)
    assert plans["synchronous"].problem.parallel == plans["optimal"].problem.parallel
    assert plans["synchronous"].problem.rhythm.is_synchronous
    assert plans["optimal"].problem.rhythm.delay == 1


def test_forms_that_come_to_one_plan_are_said_to_once() -> None:
    outcomes = job(Rhythm(), "auto").plans(measured())
    assert _same_plans(outcomes, conclude(outcomes)) == [
        "pipeline is the same plan as heuristic",
        "hybrid and optimal are the same plan as data",
    ]


def test_a_synchronous_comparison_has_no_such_row() -> None:
    for rhythm in (None, Rhythm()):
        free_rhythm: Any = rhythm
        assert "synchronous" not in [outcome.strategy for outcome in job(free_rhythm).plans(measured())]


def test_staleness_is_compared_on_average() -> None:
    """A typical step has no stall, so without that the synchronous run would look the faster one."""
    seen = measured(1e9, stalls=STALLS)
    outcomes = job(Rhythm(staleness=3)).plans(seen)
    assert [outcome.strategy for outcome in outcomes] == ROWS
    plans = by_name(outcomes)
    best, plain = plans["optimal"], plans["synchronous"]
    assert plain.predicted.iteration_s < best.predicted.iteration_s
    rows = {row.strategy: row for row in summarize_outcomes(outcomes)}
    # with one in ten of 10: 1 + 9 × the mean of (1 − 0.9²)
    expected = plain.predicted.iteration_s * (1 + 9 * (1 - 0.9**2))
    assert rows["synchronous"].predicted_s == pytest.approx(expected, rel=0.08)
    assert rows["synchronous"].predicted_s == pytest.approx(best.predicted.stale.synchronous_s, rel=0.15)
    assert rows["synchronous"].predicted_interval is None
    assert rows["alone"].predicted_s == pytest.approx(plans["alone"].predicted.iteration_s * fmean(STALLS))
    gain = conclude(outcomes).over("synchronous")
    assert gain is not None
    assert gain.faster
    assert gain.predicted == pytest.approx(rows["synchronous"].predicted_s / rows["optimal"].predicted_s)
    assert any("on average" in text for text in _choice(outcomes))
    assert long_run_step_s(plain, {}) == plain.predicted.iteration_s
    assert long_run_step_s(best, {"a/cpu:0": STALLS}) == best.predicted.iteration_s


def test_where_steps_are_even_staleness_is_compared_as_predicted() -> None:
    outcomes = job(Rhythm(staleness=3)).plans(measured(1e9))
    rows = {row.strategy: row for row in summarize_outcomes(outcomes)}
    assert rows["synchronous"].predicted_s == by_name(outcomes)["synchronous"].predicted.iteration_s


@pytest.mark.parametrize("local_steps", [4, "auto"])
def test_a_round_counts_as_the_steps_whose_samples_it_trains_on(local_steps: Any) -> None:
    outcomes = job(Rhythm(local_steps=local_steps)).plans(measured(1e6))
    assert [outcome.strategy for outcome in outcomes] == ROWS
    plans = by_name(outcomes)
    assert plans["alone"].problem.rhythm.is_synchronous
    best = plans["optimal"]
    microbatches = sum(pipeline.microbatches * pipeline.local_steps for pipeline in best.pipelines)
    assert best.steps_per_iteration == microbatches / 4
    assert best.step_s == pytest.approx(best.predicted.iteration_s * 4 / microbatches)
    assert plans["synchronous"].steps_per_iteration == 1
    rows = {row.strategy: row for row in summarize_outcomes(outcomes)}
    assert rows["optimal"].predicted_s == pytest.approx(best.step_s)
    assert rows["optimal"].steps_per_iteration == best.steps_per_iteration
    busy = {replica.device: replica.compute_s for replica in best.predicted.replicas}
    for share in rows["optimal"].shares:
        assert share.predicted_compute_s == pytest.approx(busy[share.device] * 4 / microbatches)
    assert "local steps" in rows["optimal"].layers
    even = plans["even"]
    assert rows["optimal"].predicted_speedup == pytest.approx(even.step_s / best.step_s)
    gain = compare_plans(outcomes[-1], outcomes[-2])
    assert gain is not None
    assert gain.predicted == pytest.approx(plans["synchronous"].predicted.iteration_s / best.step_s)
    text = _choice(outcomes)[1]
    assert text.startswith("a round counts as ")
    if local_steps == 4:
        assert best.steps_per_iteration == 4
        assert text == "a round counts as 4 steps: seconds are for the samples of one step"


def test_owners_stand_beside_an_average_after_every_step() -> None:
    """Each owner's local steps are of batches of its own, so both count by all of them."""
    outcomes = job(Rhythm(local_steps=4, prox_mu=0.1, outer_lr=0.7), owners="all").plans(measured(1e6))
    plans = by_name(outcomes)
    assert list(plans) == ["even", "synchronous", "optimal"]
    best, plain = plans["optimal"], plans["synchronous"]
    assert plain.problem.rhythm == Rhythm(local_steps=1)
    assert plain.problem.owners == best.problem.owners == (("a",), ("b",))
    assert (best.steps_per_iteration, plain.steps_per_iteration) == (8, 2)
    rows = {row.strategy: row for row in summarize_outcomes(outcomes)}
    assert rows["synchronous"].predicted_s == pytest.approx(plain.predicted.iteration_s / 2)
    assert rows["optimal"].predicted_s == pytest.approx(best.predicted.iteration_s / 8)
    assert rows["optimal"].layers == "a | b, each on batches of its own; 4 local steps"
    assert {share.samples for share in rows["optimal"].shares} == {8}
    gain = conclude(outcomes).over("synchronous")
    assert gain is not None
    assert gain.predicted == pytest.approx(rows["synchronous"].predicted_s / rows["optimal"].predicted_s)
    assert _choice(outcomes)[1] == (
        "a round counts as 8 steps (even, optimal), 2 steps (synchronous): seconds are for the samples of "
        "one step"
    )
    for steps in (1, (1, 1)):
        outcomes = job(Rhythm(local_steps=steps), owners="all").plans(measured())
        assert [outcome.strategy for outcome in outcomes] == ["even", "optimal"]


def test_an_owners_pipeline_is_shown_by_its_stages(reports: ModuleType) -> None:
    seen = measured(1e6)
    third = device("c", 1.0)
    both = [pair for name in SPEEDS for pair in ((name, "c"), ("c", name))]
    links = [LinkProfile(source=s, target=t, latency_s=0.001, bandwidth_bytes_per_s=1e9) for s, t in both]
    more = {"devices": (*seen.devices, third), "links": (*seen.links, *links)}
    outcomes = job(Rhythm(local_steps=2), owners=(("a",), ("b", "c"))).plans(seen.model_copy(update=more))
    best = by_name(outcomes)["optimal"]
    assert [len(pipeline.stages) for pipeline in best.pipelines] == [1, 2]
    row = summarize_outcomes(outcomes)[-1]
    assert row.layers.startswith("a | ")
    assert " · " in row.layers
    page = reports.Reader(render_report(reports.make_report(outcomes)))
    assert page.faults == []
    assert "all owners, each with its machine" in page.words
    assert "averaged after every step" in page.words


def test_runs_of_rounds_are_compared_by_samples() -> None:
    plans = by_name(job(Rhythm(local_steps=4)).plans(measured()))
    outcomes = [
        StrategyOutcome(
            "synchronous", plans["synchronous"], measurement=ran(plans["synchronous"], [1.0] * 9)
        ),
        StrategyOutcome("optimal", plans["optimal"], measurement=ran(plans["optimal"], [1.6, 2.0, 2.4] * 3)),
    ]
    plain, rounds = summarize_outcomes(outcomes)
    assert rounds.measured is not None
    assert rounds.measured.median == 0.5
    assert rounds.measured_sync_s == 0.1
    assert (plain.measured_s, plain.measured_sync_s) == (1.0, 0.4)
    assert rounds.prediction_error == pytest.approx(plans["optimal"].step_s / 0.5 - 1)
    gain = conclude(outcomes).over("synchronous")
    assert gain is not None
    assert gain.measured == pytest.approx(2.0)
    assert gain.low is not None
    assert 1 < gain.low < 2 < (gain.high or 0.0)
    table = ProgressTable(outcomes, 9)
    table.add_step("optimal", 2.0, 2.0)
    table.end_run(outcomes[1])
    assert "done, 10 rounds" in table.ended_line("optimal")
    assert "500 ms a step" in table.ended_line("optimal")
    text = Comparison(rows=(plain, rounds)).to_json()
    assert text.count('"steps_per_iteration": 4.0') == 1
    assert parse(Comparison, text, "here").rows == (plain, rounds)


def test_runs_with_a_parameter_server_are_compared_on_average() -> None:
    """Medians would call the synchronous run the faster one."""
    plans = by_name(job(Rhythm(staleness=3)).plans(measured(1e9, stalls=STALLS)))
    plain, best = plans["synchronous"], plans["optimal"]
    outcomes = [
        StrategyOutcome("synchronous", plain, measurement=ran(plain, ([0.10] * 4 + [1.0]) * 8)),
        StrategyOutcome("optimal", best, measurement=ran(best, ([0.11] * 9 + [0.2]) * 4, mean_s=0.14)),
    ]
    rows = summarize_outcomes(outcomes)
    assert [row.measured.median for row in rows if row.measured] == pytest.approx([0.10, 0.11])
    assert [row.measured_s for row in rows] == pytest.approx([0.28, 0.14])
    table = ProgressTable(outcomes, 40)
    for outcome, took in zip(outcomes, ("280 ms a step", "140 ms a step"), strict=True):
        table.end_run(outcome)
        assert took in table.ended_line(outcome.strategy)
    gain = conclude(outcomes).over("synchronous")
    assert gain is not None
    assert gain.measured == pytest.approx(2.0)
    assert gain.told
    few = [StrategyOutcome("synchronous", plain, measurement=ran(plain, [0.1, 0.2])), outcomes[1]]
    gain = conclude(few).over("synchronous")
    assert gain is not None
    assert not gain.told  # two steps say little of their mean
    text = Comparison(rows=tuple(rows)).to_json()
    assert parse(Comparison, text, "here").rows == tuple(rows)


def test_rounds_are_said_to_gain_nothing_on_fast_lines() -> None:
    """A synchronous step hides most of its sum, and a round hides nothing of its average."""
    outcomes = job(Rhythm(local_steps=4)).plans(measured())
    assert conclude(outcomes).best == "synchronous"
    text = describe_conclusion(conclude(outcomes), summarize_outcomes(outcomes))
    assert text.startswith("synchronous is ")
    assert "× as fast as optimal" in text


def test_a_report_of_rounds_is_whole(reports: ModuleType) -> None:
    page = reports.Reader(render_report(reports.make_report(job(Rhythm(local_steps=4)).plans(measured(1e6)))))
    assert page.faults == []
    assert "a round counts as 4 steps" in page.words
    assert "as fast as synchronous" in page.words
    assert "a round; nothing is claimed" in page.words


def test_a_sweep_of_nodes_has_the_rows_of_all_points() -> None:
    delayed_job, seen = job(Rhythm(delay=1)), measured()
    outcomes = delayed_job.plans(seen)
    points = plan_nodes(delayed_job, seen, outcomes, (1, 2), lambda _text: None)
    sweep = nodes_sweep(points, 2)
    assert [[cell.strategy for cell in point.cells] for point in sweep.points] == [
        ["even", "alone", "heuristic", "optimal"]
    ] * 2
    heads, rows = sweep_table(sweep)
    assert {len(row) for row in rows} == {len(heads)}


def test_a_round_beside_a_parameter_server_counts_by_samples() -> None:
    seen = measured(1e9, stalls=STALLS)
    rounds = by_name(job(Rhythm(local_steps=4)).plans(seen))["optimal"]
    stale = by_name(job(Rhythm(staleness=3)).plans(seen))["optimal"]
    row, _ = summarize_outcomes([StrategyOutcome("even", rounds), StrategyOutcome("optimal", stale)])
    uneven = {device.id: device.step_factors for device in stale.problem.devices}
    assert row.predicted_s == pytest.approx(long_run_step_s(rounds, uneven))
    assert rounds.step_s < row.predicted_s < rounds.predicted.iteration_s, "stalls lengthen a step, of four"
