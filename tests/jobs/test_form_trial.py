"""Which forms are tried before a run, and which is taken after."""

from __future__ import annotations

import pytest
from tests.helpers.bare_records import OF_MEASUREMENT
from tests.learning.timed_plans import timed_plan, with_interval

from skyctl.compare.form_summary import describe_forms, form_table
from skyctl.compare.outcome import StrategyOutcome
from skyctl.jobs.form_trial import FormTrial, contenders, fastest_tried, with_tried_forms
from skyctl.planning.parallelism_choice import ParallelismResult, choose_among
from skyctl.records.measurement import Measurement, Quantiles
from skyctl.records.plan import Plan


def plan_of(form: str, low_s: float, step_s: float, high_s: float) -> Plan:
    return with_interval(timed_plan(form, step_s), low_s, high_s)


def tried(form: str, step_s: float | None, predicted_s: float = 1.0) -> StrategyOutcome:
    plan = plan_of(form, 0.9 * predicted_s, predicted_s, 1.1 * predicted_s)
    return StrategyOutcome(form, plan, measurement=None if step_s is None else measured(plan, step_s))


def measured(plan: Plan, step_s: float) -> Measurement:
    return Measurement(
        run_id="run",
        strategy=plan.strategy,
        steps=[],
        iteration_s=Quantiles(median=step_s, p10=step_s, p90=step_s),
        predicted_iteration_s=plan.predicted.iteration_s,
        replicas=[],
        final_loss=1.0,
        attempts=1,
        weights=None,
        sync_s=None,
        mean_iteration_s=None,
        **OF_MEASUREMENT,
    )


@pytest.mark.parametrize(
    ("hybrid", "forms"),
    [
        ((1.05, 1.2, 1.4), ["pipeline", "data", "hybrid"]),
        ((1.11, 1.2, 1.4), ["pipeline", "data"]),
        ((0.2, 0.3, 0.4), ["hybrid"]),
    ],
)
def test_a_form_contends_unless_another_interval_lies_below_its_own(hybrid, forms: list[str]) -> None:
    plans = [plan_of("pipeline", 0.9, 1.0, 1.1), plan_of("data", 1.0, 1.1, 1.3), plan_of("hybrid", *hybrid)]
    assert [plan.problem.parallel for plan in contenders(plans)] == forms


def test_equal_plans_are_tried_once_and_those_without_an_interval_not_at_all() -> None:
    plan = plan_of("data", 0.9, 1.0, 1.1)
    assert contenders([plan, plan]) == [plan]
    assert contenders([timed_plan("data", 1.0), plan]) == [plan]


def test_a_run_is_to_be_ten_times_as_long_as_all_trials() -> None:
    trial = FormTrial((plan_of("data", 0.9, 1.0, 1.1), plan_of("pipeline", 0.9, 2.0, 1.1)))
    assert trial.seconds == pytest.approx(11 * 3.0)
    assert trial.is_worth(220)
    assert not trial.is_worth(219)


def test_the_shortest_measured_step_is_taken_and_of_equal_ones_the_simplest() -> None:
    def form(*outcomes: StrategyOutcome) -> str | None:
        best = fastest_tried(outcomes)
        return None if best is None else best.strategy

    assert form(tried("pipeline", 1.0), tried("data", 1.2), tried("hybrid", 0.9)) == "hybrid"
    assert form(tried("pipeline", 1.0), tried("data", 1.005)) == "data"
    assert form(tried("pipeline", None), tried("data", 9.0)) == "data", "one that failed is left out"
    assert form(tried("pipeline", None)) is None


def test_the_plan_says_what_each_form_was_measured_at() -> None:
    by_prediction = choose_among(
        [
            ParallelismResult("pipeline", timed_plan("pipeline", 0.9)),
            ParallelismResult("data", timed_plan("data", 1.0)),
        ]
    )
    assert by_prediction is not None
    outcomes = [tried("pipeline", 1.3, 0.9), tried("data", 1.1)]
    best = fastest_tried(outcomes)
    assert best is not None
    assert best.plan is not None
    plan = with_tried_forms(best.plan, by_prediction.forms, outcomes)
    assert plan.problem.parallel == "data"
    assert [(one.parallel, one.iteration_s, one.measured_s) for one in plan.forms] == [
        ("pipeline", 0.9, 1.3),
        ("data", 1.0, 1.1),
    ]
    assert "data parallelism, by ten measured steps of each" in " ".join(describe_forms(plan))
    heads, rows = form_table(plan)
    assert [row[heads.index("measured")] for row in rows] == ["1.30 s", "1.10 s"]
    assert Plan.model_validate_json(plan.to_json()) == plan
