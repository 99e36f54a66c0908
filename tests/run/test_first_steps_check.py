"""An attempt's first steps: compared once, as its own, with the plan that it plays."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.simulated_runs import A, planned, problem, ran

from skyctl.learning.corrections import Subject
from skyctl.planner.api import plan
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.run_state import RunAttempt, RunState
from skyctl.run.callbacks import RunCallbacks, StepProgress
from skyctl.run.first_steps_check import FIRST_STEPS, FirstStepsCheck


@dataclass
class Watched:
    """A run whose steps take what ``done`` says, and what came of it."""

    made: Plan
    done: Measurement
    first: int = 0
    attempts: tuple[RunAttempt, ...] = (
        RunAttempt(number=1, began="then", why="launched", from_step=0),
        RunAttempt(number=2, began="then", why="node b was lost", from_step=0),
    )
    notes: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    kept: list[Subject] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = RunState(
            run_id="r1", created="then", written="then", workload="w", cluster="c", steps=100,
            attempts=self.attempts,
        )  # fmt: skip

    def update(self, **changes: Any) -> None:
        self.state = self.state.model_copy(update=changes)

    def keep(self, _plan: Plan, _done: Measurement, part: Subject) -> bool:
        self.kept.append(part)
        return True

    def run(self, steps: int, until: int | None = None) -> Watched:
        """So many steps, of which ``until`` are made (None: all)."""
        first_steps = FirstStepsCheck.of(self.made, self.first, self.keep)
        run: Any = SimpleNamespace(journal=self, callbacks=RunCallbacks(note=self.notes.append))
        for now in range(self.first, until or steps):
            if first_steps is not None and first_steps.are_over(
                StepProgress(now, steps, 1.0, 0.6, 1.0, None)
            ):
                self.asked.append(now)
                first_steps.compare(self.done, run)
        return self


def test_once_after_ten_steps_of_an_attempt_that_takes_longer_than_predicted() -> None:
    made = planned("pipeline")
    for first in (0, 7):
        seen = Watched(made, ran(made, problem("pipeline", {A: 1.5})), first).run(100, 40)
        assert seen.asked == [first + FIRST_STEPS]
        (note,) = seen.notes
        assert f"computing on {A} takes" in note
        assert seen.kept == [(A, None)]
        before, now = seen.state.attempts
        assert before.first_steps is None
        assert now.first_steps is not None
        assert now.first_steps.part is not None
        assert now.first_steps.part.kept


def test_within_the_interval_it_is_written_down_and_nothing_is_said() -> None:
    made = planned("pipeline")
    seen = Watched(made, ran(made, problem("pipeline"))).run(100, 40)
    assert (seen.notes, seen.kept) == ([], [])
    found = seen.state.attempts[-1].first_steps
    assert found is not None
    assert found.part is None


@pytest.mark.parametrize(("steps", "asked"), [(3, []), (4, [3]), (10, [9]), (11, [10])])
def test_a_shorter_run_is_compared_with_what_it_has(steps: int, asked: list[int]) -> None:
    made = planned("pipeline")
    assert Watched(made, ran(made, problem("pipeline"))).run(steps).asked == asked


def test_what_no_profile_has_figures_of_is_said_and_not_kept() -> None:
    made = planned("data")
    seen = Watched(made, ran(made, problem("data"), sum_factor=2.0)).run(100, 40)
    assert (len(seen.notes), seen.kept) == (1, [])
    found = seen.state.attempts[-1].first_steps
    assert found is not None
    assert found.part is not None
    assert (found.part.kind, found.part.kept) == ("sum", False)


def test_a_plan_without_interval_is_not_watched() -> None:
    made = plan(problem("pipeline"), "even")
    assert Watched(made, ran(made, problem("pipeline"), idle_s=1.0)).run(100, 40).asked == []
