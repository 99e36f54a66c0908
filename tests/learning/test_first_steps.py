"""A run's first steps beside the prediction: the part that was changed is the part that is named."""

from __future__ import annotations

import pytest
from tests.helpers.simulated_runs import IDS, A, B, planned, predicted_on, problem, ran

from skyctl.compare.deviation import MAX_CAUSES
from skyctl.learning.first_steps import compare_first_steps, first_steps_text
from skyctl.planner.api import plan
from skyctl.planner.prediction_interval import with_interval
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.problem import Parallel
from skyctl.records.run_state import DeviatingPart


def named(this_plan: Plan, done: Measurement) -> DeviatingPart:
    first_steps = compare_first_steps(this_plan, done)
    assert first_steps is not None
    assert first_steps.part is not None
    assert first_steps.steps == 10
    assert not first_steps.part.kept
    return first_steps.part


@pytest.mark.parametrize("parallel", ["pipeline", "data"])
def test_steps_as_predicted_have_no_part_at_fault(parallel: Parallel) -> None:
    the_plan = planned(parallel)
    first_steps = compare_first_steps(the_plan, ran(the_plan, problem(parallel)))
    assert first_steps is not None
    assert first_steps.part is None
    assert first_steps.measured_s == pytest.approx(first_steps.predicted_s)
    assert first_steps.interval == the_plan.predicted.interval


def test_steps_of_a_plan_without_interval_are_not_compared() -> None:
    the_plan = plan(problem("pipeline"), "even")
    assert compare_first_steps(the_plan, ran(the_plan, problem("pipeline"), idle_s=1.0)) is None


@pytest.mark.parametrize("device", IDS)
@pytest.mark.parametrize("parallel", ["pipeline", "data"])
def test_a_device_that_is_slower(parallel: Parallel, device: str) -> None:
    the_plan = planned(parallel)
    part = named(the_plan, ran(the_plan, problem(parallel, {device: 1.5})))
    assert (part.kind, part.device, part.target) == ("computing", device, None)
    assert part.seen_s == pytest.approx(1.5 * part.predicted_s)


@pytest.mark.parametrize("parallel", ["pipeline", "data"])
def test_devices_that_are_all_faster(parallel: Parallel) -> None:
    """Neither alone makes a step much faster: the other holds it up."""
    the_plan = planned(parallel)
    part = named(the_plan, ran(the_plan, problem(parallel, {A: 0.5, B: 0.6})))
    assert part.kind == "computing"
    assert part.seen_s < part.predicted_s


def test_more_devices_that_are_all_faster_than_are_tried_one_by_one() -> None:
    ids = tuple(f"n{i}/cpu:0" for i in range(2 * MAX_CAUSES))
    the_plan = with_interval(plan(problem("pipeline", ids=ids), "even"))
    part = named(the_plan, ran(the_plan, problem("pipeline", dict.fromkeys(ids, 0.5), ids=ids)))
    assert part.kind == "computing"


def test_the_device_that_is_faster_and_had_held_steps_up() -> None:
    the_plan = with_interval(predicted_on(problem("pipeline", {A: 2.0}), planned("pipeline")))
    part = named(the_plan, ran(the_plan, problem("pipeline")))
    assert (part.kind, part.device) == ("computing", A)
    assert part.seen_s == pytest.approx(part.predicted_s / 2)


@pytest.mark.parametrize("link", [IDS, IDS[::-1]])
def test_a_link_that_is_slower_or_faster(link: tuple[str, str]) -> None:
    slow, fast = problem("pipeline", link=link), problem("pipeline")
    the_plan = planned("pipeline")
    part = named(the_plan, ran(the_plan, slow))
    assert (part.kind, (part.device, part.target)) == ("link", link)
    assert (part.seen_s, part.predicted_s) == pytest.approx((0.061, 0.021))
    before = with_interval(predicted_on(slow, the_plan))
    part = named(before, ran(before, fast))
    assert (part.kind, (part.device, part.target)) == ("link", link)
    assert (part.seen_s, part.predicted_s) == pytest.approx((0.021, 0.061))


@pytest.mark.parametrize("factor", [2.0, 0.3])
def test_a_sum_that_is_slower_or_faster(factor: float) -> None:
    the_plan = planned("data")
    part = named(the_plan, ran(the_plan, problem("data"), sum_factor=factor))
    assert (part.kind, part.device) == ("sum", None)
    assert part.predicted_s == the_plan.predicted.sync_s > 0
    assert part.seen_s == pytest.approx(factor * part.predicted_s)


@pytest.mark.parametrize(("parallel", "idle_s"), [("pipeline", 0.3), ("pipeline", -0.1), ("data", 0.3)])
def test_waiting_for_more_or_less_than_planned(parallel: Parallel, idle_s: float) -> None:
    the_plan = planned(parallel)
    part = named(the_plan, ran(the_plan, problem(parallel), idle_s=idle_s))
    assert part.kind == "waiting"
    assert part.seen_s - part.predicted_s == pytest.approx(idle_s)


def test_the_line_says_what_the_record_says() -> None:
    the_plan = planned("pipeline")
    first_steps = compare_first_steps(the_plan, ran(the_plan, problem("pipeline", {B: 1.5})))
    assert first_steps is not None
    assert first_steps.part is not None
    text = first_steps_text(first_steps, first_steps.part)
    assert text.startswith("steps take ")
    assert text.count("predicted") == 2
    assert f"computing on {B} takes " in text
    link = DeviatingPart(kind="link", device=A, target=B, seen_s=0.061, predicted_s=0.021)
    assert first_steps_text(first_steps, link).endswith(
        f": a message {A} → {B} takes 61.0 ms, predicted 21.0 ms"
    )
    total = DeviatingPart(kind="sum", seen_s=0.2, predicted_s=0.1)
    assert first_steps_text(first_steps, total).endswith(
        ": the gradients' sum takes 200 ms, predicted 100 ms"
    )
    rest = DeviatingPart(kind="waiting", device=A, seen_s=0.2, predicted_s=0.1)
    assert f"beside its layers {A} spends 200 ms a step" in first_steps_text(first_steps, rest)
