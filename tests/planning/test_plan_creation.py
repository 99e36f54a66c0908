"""The plans for a profile: parallelisms, assignments, a comparison's rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.learning.profiles import device, profile

from skyctl.compare.conclusion import conclude
from skyctl.compare.outcome import pipeline_problem, summarize_outcomes
from skyctl.errors import InfeasibleError, InputError
from skyctl.jobs.comparison_job import ComparisonJob, plan_strategies
from skyctl.planning.assignment import parse_assign
from skyctl.planning.plan_from_profile import plan_profile
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.plan import WorkloadRef


def test_a_plan_prefers_the_fast_device() -> None:
    plan = plan_profile(profile(device("slow", 4.0), device("fast", 1.0)), PlanOptions(microbatches=4))
    share = {s.replicas[0].device: s.stop - s.start for s in plan.stages}
    assert share["fast/cpu:0"] > share.get("slow/cpu:0", 0)


def test_all_layers_on_each_device_have_one_schedule_and_a_pipeline_beside_them() -> None:
    both = profile(device("slow", 4.0), device("fast", 1.0))
    options = PlanOptions(parallel="data", sync_format="bfloat16", beside_pipeline=True)
    plan = plan_profile(both, options)
    assert (plan.problem.parallel, plan.problem.sync_format) == ("data", "bfloat16")
    assert (plan.problem.schedule, plan.problem.recompute) == ("1f1b", True)
    assert plan.pipeline_iteration_s is not None
    share = {p.stages[0].device: p.microbatches for p in plan.pipelines}
    assert share["fast/cpu:0"] > share.get("slow/cpu:0", 0)
    assert plan_profile(both, PlanOptions(parallel="data")).pipeline_iteration_s is None
    with pytest.raises(InputError, match="orders a pipeline's stages"):
        plan_profile(both, PlanOptions(parallel="data", schedule="zero-bubble"))
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    rows = plan_strategies(both, PlanOptions(parallel="data"), ref)
    assert [len(row.plan.pipelines) for row in rows if row.plan is not None and row.strategy == "alone"] == [
        1
    ]
    assert all(row.plan is not None and row.plan.problem.parallel == "data" for row in rows)


@pytest.mark.parametrize(("parallelism", "other"), [("data", "pipeline"), (None, "data")])
def test_a_comparison_has_a_row_of_the_other_parallelism(parallelism: str | None, other: str) -> None:
    both = profile(device("slow", 4.0), device("fast", 1.0))
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    request: Any = SimpleNamespace(ref=lambda _digest: ref)
    loaded: Any = SimpleNamespace(digest="w")
    cluster: Any = None
    job = ComparisonJob(cluster, request, loaded, PlanOptions(parallel=parallelism), other_form=True)
    outcomes = job.plans(both)
    assert [outcome.strategy for outcome in outcomes] == ["even", "alone", "heuristic", other, "optimal"]
    parallel = {
        outcome.strategy: outcome.plan.problem.parallel for outcome in outcomes if outcome.plan is not None
    }
    assert parallel[other] == other
    assert parallel["optimal"] == (parallelism or "pipeline")
    problem = pipeline_problem(outcomes)
    assert problem is not None
    assert problem.parallel == parallel["optimal"]
    row = summarize_outcomes(outcomes)[3]
    assert (row.strategy, row.proved) == (other, True)
    assert conclude(outcomes).over(other) is not None or conclude(outcomes).best == other


def test_a_comparison_of_all_parallelisms_has_a_row_of_each_and_takes_one() -> None:
    both = profile(device("slow", 4.0), device("fast", 1.0))
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    request: Any = SimpleNamespace(ref=lambda _digest: ref)
    loaded: Any = SimpleNamespace(digest="w")
    cluster: Any = None
    outcomes = ComparisonJob(cluster, request, loaded, PlanOptions(parallel="auto")).plans(both)
    assert [outcome.strategy for outcome in outcomes] == [
        "even", "alone", "heuristic", "pipeline", "data", "hybrid", "optimal",
    ]  # fmt: skip
    plans = {outcome.strategy: outcome.plan for outcome in outcomes}
    taken = plans["optimal"]
    assert taken is not None
    assert [outcome.parallel for outcome in taken.forms] == ["pipeline", "data", "hybrid"]
    own = plans[taken.problem.parallel]
    assert own is not None
    assert (taken.pipelines, own.forms) == (own.pipelines, ())
    for name in ("even", "alone", "heuristic", "pipeline"):
        shown = plans[name]
        assert shown is None or shown.problem.parallel == "pipeline"
    parallelisms = ComparisonJob(cluster, request, loaded, PlanOptions(parallel="hybrid"), other_form=True)
    assert [outcome.strategy for outcome in parallelisms.plans(both)][3:] == ["pipeline", "data", "optimal"]
    asked = PlanOptions(parallel="auto", sync="trees")
    outcomes = ComparisonJob(cluster, request, loaded, asked).plans(both)
    assert [outcome.strategy for outcome in outcomes][3:] == ["pipeline", "data", "optimal"]
    assert outcomes[-1].plan is not None
    assert outcomes[-1].plan.problem.parallel == "data"


def test_auto_plans_what_a_profile_says_in_every_parallelism() -> None:
    """Their problems are the same but for the parallelism, so what is proved of each can be found again."""
    both = profile(device("slow", 4.0), device("fast", 1.0))
    plan = plan_profile(both, PlanOptions(parallel="auto"))
    assert [outcome.parallel for outcome in plan.forms] == ["pipeline", "data", "hybrid"]
    assert all(each.reduce_byte_s > 0 for each in plan.problem.devices)
    assert plan.predicted.iteration_s <= min(outcome.iteration_s or 1e9 for outcome in plan.forms) * 1.01


def test_left_to_itself_the_best_strategys_microbatches_serve_all() -> None:
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    outcomes = plan_strategies(
        profile(device("a", 1.0), device("b", 3.0)), PlanOptions(), ref, ("optimal", "even")
    )
    assert [o.strategy for o in outcomes] == ["optimal", "even"]
    assert {o.plan.problem.microbatches for o in outcomes if o.plan} == {4}


def test_a_strategy_that_does_not_fit_is_an_outcome_that_says_why() -> None:
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    small = profile(device("a", 1.0), device("b", 1.0, memory=1.6e6))
    even, optimal = plan_strategies(small, PlanOptions(), ref, ("even", "optimal"))
    assert even.plan is None
    assert "b/cpu:0" in str(even.error)
    assert optimal.plan is not None
    with pytest.raises(InfeasibleError, match="no strategy"):
        plan_strategies(profile(device("a", 1.0, memory=1e6)), PlanOptions(), ref)


def test_an_assignment_is_taken_as_given() -> None:
    assign = parse_assign("a=0:1,b=1:6")
    plan = plan_profile(profile(device("a", 1.0), device("b", 1.0)), PlanOptions(assign=assign))
    assert [(s.start, s.stop) for s in plan.stages] == [(0, 1), (1, 6)]
    assert plan.strategy == "assigned"


@pytest.mark.parametrize("text", ["a", "a=1", "a=1:x", "=0:3", "", "a=0:²", "a=0:" + "1" * 5000])
def test_a_malformed_assignment_says_what_is_wanted(text: str) -> None:
    with pytest.raises(InputError, match="NODE=START:STOP"):
        parse_assign(text)


def test_an_assignment_to_an_unknown_device_lists_the_devices() -> None:
    with pytest.raises(InputError, match=r"no device is so called\. Devices: a/cpu:0"):
        plan_profile(profile(device("a", 1.0)), PlanOptions(assign=[("q", 0, 6)]))
