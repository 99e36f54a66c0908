"""Which parallelism is taken, what each came to, and which are not looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.learning.timed_plans import PROBLEM, timed_plan

from skyctl.compare.form_summary import describe_forms, form_table, least_bound_s
from skyctl.errors import InfeasibleError, InputError, UndecidedError
from skyctl.planning.parallelism_choice import (
    ParallelismResult,
    choose_among,
    choose_parallelism,
    with_parallelism,
)
from skyctl.planning.plan_creation import parallelisms_left_out, plan_best
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.problem_overrides import override_problem
from skyctl.records.plan import Plan


def chosen(pipeline_s: float, data_s: float, hybrid_s: float) -> Plan:
    times = {"pipeline": pipeline_s, "data": data_s, "hybrid": hybrid_s}
    plan = choose_among(
        [
            ParallelismResult(parallelism, timed_plan(parallelism, step_s))
            for parallelism, step_s in times.items()
        ]
    )
    assert plan is not None
    assert [(outcome.parallel, outcome.iteration_s) for outcome in plan.forms] == list(times.items())
    return plan


@pytest.mark.parametrize(
    ("steps", "parallelism", "words"),
    [
        ((1.0, 2.0, 3.0), "pipeline", "a pipeline, 2.00× as fast as the next best (data)"),
        ((1.0, 2.0, 0.98), "hybrid", "several pipelines, 1.02× as fast as the next best (pipeline)"),
        (
            (1.0, 2.0, 0.995),
            "pipeline",
            "the simplest that is hardly slower than the fastest (hybrid: 995 ms",
        ),
        ((1.0, 1.005, 0.998), "data", "data parallelism, the simplest that is hardly slower"),
        ((2.0, 1.0, 1.002), "data", "data parallelism, hardly faster than the next best (hybrid)"),
        ((1.0, 1.0, 1.0), "data", "data parallelism, the simplest of those as fast"),
    ],
)
def test_the_simplest_within_a_hundredth_of_the_fastest(steps, parallelism: str, words: str) -> None:
    plan = chosen(*steps)
    assert plan.problem.parallel == parallelism
    assert words in " ".join(describe_forms(plan))
    assert [row[0] for row in form_table(plan)[1]].count(f"{parallelism}*") == 1


def test_one_device_is_simpler_than_any_parallelism() -> None:
    alone = timed_plan("pipeline", 1.009, strategy="alone")
    plan = choose_among(
        [ParallelismResult("pipeline", alone), ParallelismResult("data", timed_plan("data", 1.0))]
    )
    assert plan is not None
    assert len(plan.placed_stages) == 1
    assert "one device alone" in " ".join(describe_forms(plan))


def test_of_plans_as_simple_the_parallelism_that_comes_first_is_taken() -> None:
    data = timed_plan("data", 1.005)
    alike = timed_plan("data", 1.0)
    alike = alike.model_copy(update={"problem": with_parallelism(PROBLEM, "hybrid")})
    plan = choose_among([ParallelismResult("hybrid", alike), ParallelismResult("data", data)])
    assert plan is not None
    assert plan.problem.parallel == "data"


def test_the_bound_of_all_parallelisms_needs_one_of_each_that_may_fit() -> None:
    bounded = [
        ParallelismResult("pipeline", timed_plan("pipeline", 1.0, 0.9)),
        ParallelismResult("data", timed_plan("data", 2.0, 1.5)),
    ]
    small = ParallelismResult("hybrid", reason="too large", fits=False)
    plan = choose_among([*bounded, small])
    assert plan is not None
    assert least_bound_s(plan.forms) == 0.9
    words = describe_forms(plan)
    assert "several pipelines: does not fit: too large" in words
    assert any(text.startswith("no plan of any form can be faster than 900 ms, with these") for text in words)
    assert words[-1].endswith("this one takes 11.1% longer")
    plan = choose_among([*bounded, replace(small, fits=True)])
    assert plan is not None
    assert least_bound_s(plan.forms) is None
    assert "several pipelines: too large" in describe_forms(plan)


def test_a_bound_for_other_microbatches_is_not_kept() -> None:
    """It could not be found again from the plan's own problem."""
    other = timed_plan("data", 2.0, 1.5)
    fewer = other.model_copy(update={"problem": other.problem.model_copy(update={"microbatches": 4})})
    plan = choose_among(
        [ParallelismResult("pipeline", timed_plan("pipeline", 1.0, 0.9)), ParallelismResult("data", fewer)]
    )
    assert plan is not None
    assert [outcome.lower_bound_s for outcome in plan.forms] == [0.9, None]


def test_where_no_parallelism_has_a_plan_the_error_says_why() -> None:
    def nothing_fits(parallelism, _limit_s):
        raise InfeasibleError(f"{parallelism} is too large")

    def nothing_found(parallelism, limit_s):
        if parallelism == "hybrid":
            raise UndecidedError("time is over")
        return nothing_fits(parallelism, limit_s)

    with pytest.raises(
        InfeasibleError, match="no form gives a plan that fits:\n  pipeline: pipeline is too large"
    ):
        choose_parallelism(nothing_fits, {}, 1.0)
    with pytest.raises(UndecidedError, match="hybrid: time is over"):
        choose_parallelism(nothing_found, {}, 1.0)
    with pytest.raises(InfeasibleError, match="hybrid: as asked"):
        choose_parallelism(nothing_found, {"hybrid": "as asked"}, 1.0)
    with pytest.raises(InputError, match="no form of plans goes with these options"):
        choose_parallelism(nothing_fits, dict.fromkeys(("pipeline", "data", "hybrid"), "as asked"), 1.0)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, ["pipeline", "data", "hybrid"]),
        ({"schedule": "auto"}, ["pipeline", "data", "hybrid"]),
        ({"schedule": "zero-bubble"}, ["pipeline"]),
        ({"objective": "bottleneck"}, ["pipeline"]),
        ({"whole_blocks": True}, ["pipeline"]),
        ({"sync_format": "bfloat16"}, ["data", "hybrid"]),
        ({"sync": "trees"}, ["data"]),
        ({"helpers": ["n2"]}, ["pipeline", "data"]),
        ({"schedule": "gpipe", "sync": "ring"}, []),
        ({"left_out": {"data": "sparse", "hybrid": "sparse"}}, ["pipeline"]),
    ],
)
def test_parallelisms_that_do_not_go_with_what_is_asked_are_left_out(options, left) -> None:
    asked = PlanOptions(parallel="auto", **options)
    out = parallelisms_left_out(asked, override_problem(PROBLEM, asked))
    assert out == parallelisms_left_out(asked)
    assert [parallelism for parallelism in ("pipeline", "data", "hybrid") if parallelism not in out] == left
    assert all(out.values())


def test_what_leaves_one_parallelism_is_planned_in_it() -> None:
    for options, parallelism in (
        ({"assign_shares": [("n0", 5), ("n1", 3)]}, "data"),
        ({"assign": [("n0", 0, 2), ("n1", 2, 4)]}, "pipeline"),
        ({"strategy": "even"}, "pipeline"),
        ({"strategy": "alone"}, "pipeline"),
    ):
        asked = PlanOptions(parallel="auto", **options)
        plan = plan_best([override_problem(PROBLEM, asked)], asked)
        assert (plan.problem.parallel, plan.forms) == (parallelism, ())
