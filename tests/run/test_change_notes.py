"""The notes when a run goes on with a plan that changes its training, not only who computes what."""

from __future__ import annotations

from typing import Any

import pytest
from tests.planner.data_problems import data_problem

from skyctl.planner.api import plan, verify
from skyctl.records.plan import Plan
from skyctl.records.rhythm import Rhythm
from skyctl.run.change_notes import change_notes
from skyctl.run.plan_update import replan, replan_without, without_nodes

ALONE = "n0/cpu:0 alone is left that can hold the whole model: it goes on with rounds of {} local steps"


def made(**more: Any) -> Plan:
    return plan(data_problem(speeds=(2.0, 1.0, 1.0), rate=1e6, **more))


@pytest.mark.parametrize("steps", [3, "auto"])
def test_local_sgd_goes_on_with_the_device_that_is_left(steps: Any) -> None:
    """With the local steps that it has made so far, or its rounds would be others."""
    had = made(rhythm=Rhythm(local_steps=steps), latency=1.0)
    first = had.pipelines[0].local_steps
    lost = {"n1": "gone", "n2": "gone"}
    left = replan_without(had, {"n0"}, lost, {}, None)
    assert [stage.device for stage in left.placed_stages] == ["n0/cpu:0"]
    assert (left.sync, left.pipelines[0].microbatches, left.pipelines[0].local_steps) == (None, 8, first)
    checked = verify(left.problem, left)
    assert checked.ok, checked
    assert change_notes(had, left) == [ALONE.format(first) + ", and averages with nobody"]
    assert Plan.model_validate_json(left.to_json()) == left
    again = replan(left, had.problem)
    assert len(again.pipelines) == len(had.pipelines) > 1, "once they are back"
    assert not any("alone" in note for note in change_notes(left, again))


def test_other_local_steps_are_said() -> None:
    """Of those that are in both plans."""
    had = made(rhythm=Rhythm(local_steps=(4, 2, 3)), owners=(("n0",), ("n1",), ("n2",)))
    left = replan(had, without_nodes(had.problem, {"n2": "gone"}))
    assert change_notes(had, left) == []
    twice = [one.model_copy(update={"local_steps": 7}) for one in left.pipelines]
    (said,) = change_notes(had, left.model_copy(update={"pipelines": tuple(twice)}))
    assert "n0 7 (it was 4), n1 7 (it was 2)" in said
    assert "batches are left out or come again" in said


@pytest.mark.parametrize(
    ("rhythm", "word"), [(Rhythm(delay=1), "a delay"), (Rhythm(staleness=3), "staleness"), (Rhythm(), None)]
)
def test_the_end_of_a_rhythm_is_said(rhythm: Rhythm, word: str | None) -> None:
    """The rhythm ends if no node is left that holds the whole model."""
    had = made(rhythm=rhythm, gradient=5e6)
    small = [device.model_copy(update={"memory_bytes": 3e7}) for device in had.problem.devices]
    problem = had.problem.model_copy(update={"devices": tuple(small)})
    left = replan(had, problem)
    assert left.problem.parallel == "pipeline"
    said = change_notes(had, left)
    assert said[0] == "no node that is left holds the whole model: going on with a pipeline"
    assert said[1:] == ([] if word is None else [f"going on synchronously, without {word}"])
    back = change_notes(left, had)
    assert back == ([] if word is None else [f"going on with {word} again"])
