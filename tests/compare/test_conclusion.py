"""A comparison's conclusion, and its words: by what was measured, predicted, and how sure it is."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from skyctl.cli.show_comparison import _same_plans
from skyctl.compare import conclusion
from skyctl.compare.conclusion import compare_plans, conclude, describe_conclusion
from skyctl.compare.outcome import StrategyOutcome, summarize_outcomes
from skyctl.compare.step_seconds import median_errors
from skyctl.records.measurement import StepMeasurement, quantiles

TWO = ("tower/cpu:0", "laptop/cpu:0")


def conclusion_text(*outcomes: StrategyOutcome, capitalized: bool = False) -> str:
    rows = summarize_outcomes(outcomes)
    return describe_conclusion(conclude(outcomes), rows, capitalized=capitalized)


@pytest.fixture
def alone(outcome):
    """Makes an outcome of the tower alone; with ``median_s`` its steps were measured around that."""

    def make(step_s: float = 2.0, median_s: float | None = None, **more) -> StrategyOutcome:
        steps_s = None if median_s is None else [9.0, 0.99 * median_s, median_s, 1.01 * median_s]
        return outcome(
            "alone", TWO, counts=(12, 0), compute_s=(step_s,), step_s=step_s, steps_s=steps_s, **more
        )

    return make


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch):
    """Sets where the ratio of two predicted steps lies, relative to their quotient."""

    def put(low: float, high: float) -> None:
        def interval(slower, faster):
            quotient = slower.predicted.iteration_s / faster.predicted.iteration_s
            return low * quotient, high * quotient

        monkeypatch.setattr(conclusion, "ratio_interval", interval)

    return put


def test_the_headline_has_both_baselines(three, alone) -> None:
    assert conclusion_text(*three, alone(1.8, 2.0)) == (
        "optimal is 1.56× as fast as even, 1.25× as fast as tower alone, measured (predicted 1.67× and 1.20×)"
    )
    assert conclusion_text(*three) == "optimal is 1.56× as fast as even, measured (predicted 1.67×)"


def test_predicted_alone_it_says_so(outcome, alone) -> None:
    best = outcome("optimal", counts=(8, 4), compute_s=(1.0, 1.2), step_s=1.25)
    assert conclusion_text(outcome("even"), alone(2.0), best) == (
        "optimal is 2.00× as fast as even, 1.60× as fast as tower alone, predicted"
    )


def test_one_machine_that_is_best_comes_first(three, alone) -> None:
    text = conclusion_text(*three, alone(1.2, 1.25))
    assert text == (
        "tower alone is best: 1.28× as fast as optimal, 2.00× as fast as even, measured "
        "(predicted 1.25× and 2.08×)"
    )
    conclusion = conclude([*three, alone(1.2, 1.25)])
    assert (conclusion.best, conclusion.alone_is_best) == ("alone", True)
    assert conclusion_text(*three, alone(1.2, 1.25), capitalized=True) == text  # a node's name stays as it is


def test_what_was_measured_decides(three, alone) -> None:
    """The tower alone was predicted to be slower, and is not."""
    assert conclusion_text(*three, alone(3.0, 1.0)).startswith(
        "tower alone is best: 1.60× as fast as optimal"
    )


def test_one_machine_as_fast_as_all_is_best(three, alone) -> None:
    assert conclusion_text(*three, alone(1.6, 1.61)) == (
        "tower alone is as good as any: no difference that can be told from optimal; "
        "1.55× as fast as even, measured (predicted 1.56×)"
    )


def test_an_optimal_plan_that_is_one_machine(outcome, alone) -> None:
    same = outcome(
        "optimal", TWO, counts=(12, 0), compute_s=(2.0,), step_s=2.0, status="optimal", bound_s=2.0
    )
    assert conclusion_text(outcome("even"), alone(2.0), same) == (
        "tower alone is best: optimal leaves all other devices unused; 1.25× as fast as even, predicted"
    )
    gain = compare_plans(same, alone(2.0))
    assert gain is not None
    assert gain.same_plan
    other = outcome("optimal", TWO, counts=(12, 0), compute_s=(2.0,), step_s=2.0, microbatches=8)
    assert not compare_plans(other, alone(2.0)).same_plan


def test_where_no_device_holds_the_model(outcome) -> None:
    none = StrategyOutcome("alone", None, "no device can train alone: that gives a layers [0, 6), …")
    best = outcome("optimal", counts=(8, 4), compute_s=(1.0, 1.2), step_s=1.25)
    assert conclusion_text(outcome("even"), none, best) == (
        "optimal is 2.00× as fast as even, predicted; no device can train alone"
    )
    small = StrategyOutcome("even", None, "too small")
    assert conclusion_text(small, none, best) == (
        "even does not fit; optimal takes 1.25 s a step, predicted; no device can train alone"
    )


def test_faster_only_where_the_interval_says_so(outcome, alone, ratios) -> None:
    even, best = (
        outcome("even", step_s=2.0),
        outcome("optimal", counts=(8, 4), compute_s=(1.0, 1.2), step_s=1.9),
    )
    assert "1.05× as fast as even" in conclusion_text(even, best)  # unknown how sure that is: as it was
    ratios(0.9, 1.1)
    assert conclusion_text(even, best) == (
        "no difference that can be told between optimal and even: 1.05× (0.95–1.16), predicted"
    )
    assert conclusion_text(even, best, capitalized=True).startswith("No difference")
    assert conclusion_text(even, alone(1.95), best) == (
        "tower alone is as good as any: no difference that can be told from optimal; "
        "no difference that can be told from even"
    )
    ratios(0.98, 1.02)
    assert conclusion_text(even, best) == "optimal is 1.05× as fast as even, predicted"
    gain = conclude([even, best]).over("even")
    assert gain is not None
    assert gain.told
    assert (gain.low, gain.high) == pytest.approx((0.98 * 2 / 1.9, 1.02 * 2 / 1.9))


def test_runs_whose_steps_scatter_are_told_apart_less_well(outcome) -> None:
    even = outcome("even", steps_s=[9.0, 2.0, 2.0, 2.0])
    assert compare_plans(outcome("optimal", counts=(8, 4), steps_s=[9.0, 1.9, 1.9, 1.9]), even).told
    one_slow = [9.0, *[1.9, 1.91] * 6, 4.0]  # a few slow steps say nothing of the median
    assert compare_plans(outcome("optimal", counts=(8, 4), steps_s=one_slow), even).told
    wild = outcome("optimal", counts=(8, 4), steps_s=[9.0, 1.5, 1.9, 2.4])
    gain = compare_plans(wild, even)
    assert not gain.told
    assert gain.low < 1 < gain.high


def test_a_run_of_one_machine_that_failed_decides_nothing(three, alone) -> None:
    failed = StrategyOutcome("alone", alone(0.5).plan, "rank 0 died")
    assert conclude([*three, failed]).best == "optimal"
    assert conclusion_text(*three, failed).startswith("optimal is 1.56× as fast as even, measured")


def test_nothing_is_faster(three, outcome) -> None:
    assert conclusion_text() == "no strategy gives a plan that fits"
    assert conclusion_text(three[0]) == "nothing beats even here: 2.50 s a step, predicted; 2.50 s measured"
    slow = outcome("optimal", counts=(8, 4), compute_s=(1.0, 1.2), step_s=1.25, steps_s=[9.0, 5.0])
    assert conclusion_text(three[0], slow) == (
        "nothing beat even when it was run: optimal was predicted 2.00× as fast, and measured 0.50×"
    )
    none = StrategyOutcome("even", None, "too small")
    assert (
        conclusion_text(none, outcome("optimal"))
        == "even does not fit; optimal takes 2.50 s a step, predicted"
    )


def test_a_proved_plan_is_best_among_equals(outcome) -> None:
    same = [
        outcome("even"),
        outcome("heuristic", step_s=2.0),
        outcome("optimal", step_s=2.0, status="optimal"),
    ]
    assert conclude(same).best == "optimal"


def test_a_heading_begins_with_a_capital_or_a_strategys_name(three, outcome) -> None:
    assert conclusion_text(capitalized=True) == "No strategy gives a plan that fits"
    assert conclusion_text(three[0], capitalized=True).startswith("Nothing beats even here")
    assert conclusion_text(*three, capitalized=True).startswith("optimal is")
    none = StrategyOutcome("even", None, "too small")
    assert conclusion_text(none, outcome("optimal"), capitalized=True).startswith("even does not fit")


@pytest.mark.parametrize(("count", "least"), [(3, 0.72), (4, 0.8), (9, 0.8), (10, 0.8), (20, 0.8)])
def test_a_median_lies_as_often_as_it_should_within_its_errors(outcome, count: int, least: float) -> None:
    """Steps are log-normal with a median of 1 s; three of them have no ranks far enough apart."""
    draw, held = random.Random(1), 0
    measurement = outcome("even", steps_s=[1.0, 1.0]).measurement
    for _ in range(1000):
        took_s = [math.exp(draw.gauss(0, 0.1)) for _ in range(count)]
        steps = tuple(StepMeasurement(step=i, loss=1.0, iteration_s=s) for i, s in enumerate([9.0, *took_s]))
        run = measurement.model_copy(update={"steps": steps, "iteration_s": quantiles(took_s)})
        below, above = median_errors(run)
        held += -below <= -math.log(run.iteration_s.median) <= above
    assert least <= held / 1000 <= 0.92


def test_strategies_with_the_same_plan_are_named_together(outcome, alone) -> None:
    two = [
        outcome(name, counts=(8, 4), compute_s=(1.4, 1.3), step_s=2.4) for name in ("heuristic", "optimal")
    ]
    assert (
        conclusion_text(*two, alone(2.0))
        == "tower alone is best: 1.20× as fast as heuristic and optimal, predicted"
    )


@pytest.fixture
def plain(outcome):
    """Makes the outcome of the best strategy without the rhythm."""

    def make(**more) -> StrategyOutcome:
        return replace(outcome("optimal", **more), strategy="synchronous")

    return make


def test_what_a_rhythm_gains_is_said(outcome, alone, plain) -> None:
    even = outcome("even")
    best = outcome("optimal", counts=(8, 4), compute_s=(1.0, 1.2), step_s=1.25)
    without = plain(counts=(7, 5), compute_s=(1.0, 1.2), step_s=1.5)
    assert conclusion_text(even, alone(2.0), without, best) == (
        "optimal is 2.00× as fast as even, 1.60× as fast as tower alone, 1.20× as fast as synchronous, "
        "predicted"
    )
    tie = plain(counts=(7, 5), compute_s=(1.0, 1.2), step_s=1.25)
    assert conclusion_text(even, tie, best) == (
        "optimal is 2.00× as fast as even, predicted; no difference that can be told from synchronous"
    )
    same = plain(counts=(8, 4), compute_s=(1.0, 1.2), step_s=1.25)
    assert conclusion_text(even, same, best) == (
        "optimal is 2.00× as fast as even, predicted; synchronous is the same plan as optimal"
    )
    none = StrategyOutcome("synchronous", None, "too small")
    assert conclusion_text(even, none, best).endswith("as fast as even, predicted; synchronous does not fit")
    assert conclusion_text(even, without, alone(1.2), best) == (
        "tower alone is best: 1.04× as fast as optimal, 1.25× as fast as synchronous, 2.08× as fast as even, "
        "predicted"
    )


def test_a_rhythm_that_gains_nothing_is_not_the_best(outcome, plain) -> None:
    best = outcome("optimal", counts=(8, 4), compute_s=(1.0, 1.2), step_s=1.5)
    without = plain(counts=(7, 5), compute_s=(1.0, 1.2), step_s=1.25)
    assert conclusion_text(outcome("even"), without, best) == (
        "synchronous is 2.00× as fast as even, 1.20× as fast as optimal, predicted"
    )
    near = outcome("optimal", counts=(8, 4), compute_s=(1.0, 1.2), step_s=1.252)
    assert conclusion_text(outcome("even"), without, near) == (
        "synchronous is 2.00× as fast as even, predicted; no difference that can be told from optimal"
    )
    base = outcome("even", compute_s=(1.0, 1.2), step_s=1.25)
    assert conclusion_text(base, without, best).startswith(
        "nothing beats even here: 1.25 s a step, predicted; "
    )
    slow = plain(counts=(7, 5), compute_s=(1.0, 1.2), step_s=2.5)
    assert conclusion_text(base, slow, best).endswith("; even is 2.00× as fast as synchronous, predicted")


def test_rows_of_one_plan_are_named_once(outcome, alone, plain) -> None:
    """Under the table, by the first of them; or in the verdict, where that says what follows from it."""
    shape = {"counts": (8, 4), "compute_s": (1.0, 1.2), "step_s": 1.25}
    for steps_s, run in ((None, ""), ([9.0, 1.2, 1.3], ": one run measured all")):
        best = outcome("optimal", **shape, steps_s=steps_s)
        data, hybrid = (replace(best, strategy=name) for name in ("data", "hybrid"))
        outcomes = [outcome("even", steps_s=steps_s and [9.0, 2.5, 2.5]), data, hybrid, plain(**shape), best]
        assert _same_plans(outcomes, conclude(outcomes)) == [
            f"hybrid and optimal are the same plan as data{run}"
        ]
        assert conclusion_text(*outcomes).endswith("; synchronous is the same plan as optimal")
        assert _same_plans(outcomes[:3], conclude(outcomes[:3])) == [
            f"hybrid is the same plan as data{run.replace('all', 'both')}"
        ]
    fields = {"counts": (12, 0), "compute_s": (2.0,), "step_s": 2.0}
    same = [
        replace(outcome("optimal", TWO, **fields), strategy=name) for name in ("pipeline", "data", "optimal")
    ]
    outcomes = [outcome("even"), alone(2.0), *same]
    assert _same_plans(outcomes, conclude(outcomes)) == []
    assert conclusion_text(*outcomes).startswith(
        "tower alone is best: pipeline, data and optimal leave all other devices "
    )
