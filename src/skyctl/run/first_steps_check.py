"""An attempt's first steps, compared with its plan's prediction while it trains."""

from __future__ import annotations

from collections.abc import Callable

from skyctl.learning.corrections import Subject
from skyctl.learning.first_steps import compare_first_steps, first_steps_text
from skyctl.learning.observations import LEAST_STEPS, tells_layer_times
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.run.callbacks import StepProgress
from skyctl.run.journal import update_attempt
from skyctl.run.live_run import LiveRun

FIRST_STEPS = 10
"""So many steps are compared, the attempt's warm-up step left out; of a shorter attempt those that it has."""

KeepPart = Callable[[Plan, Measurement, Subject], bool]
"""Adds what an attempt saw of a device or a link to the cluster's profile; whether it did."""


class FirstStepsCheck:
    """Compares the first steps of an attempt with its plan, once.

    The comparison goes into the attempt's entry of the run's state. The time that the part at fault took
    goes into the profile at once, so that plans made meanwhile know of it.

    Args:
        first: the step that the attempt begins with.
    """

    def __init__(self, plan: Plan, first: int, keep: KeepPart) -> None:
        self._plan, self._first, self._keep = plan, first, keep

    @classmethod
    def of(cls, plan: Plan, first: int, keep: KeepPart | None) -> FirstStepsCheck | None:
        """None where nothing is to be compared: nobody keeps it, or the plan promises no interval of its own.

        Nor are steps of which layers' times tell nothing.
        """
        if keep is None or plan.predicted.interval is None or not tells_layer_times(plan):
            return None
        return cls(plan, first, keep)

    def are_over(self, progress: StepProgress) -> bool:
        """Whether the step that has just ended is the last of the first steps, so that ``compare`` is due."""
        counted, is_last = progress.step - self._first, progress.step + 1 == progress.steps
        return counted == FIRST_STEPS or (is_last and LEAST_STEPS <= counted < FIRST_STEPS)

    def compare(self, seen: Measurement, run: LiveRun) -> None:
        """Says where they are not as predicted, and writes it down.

        Args:
            seen: the measurement so far.
        """
        compared = compare_first_steps(self._plan, seen)
        if compared is None:
            return
        part = compared.part
        if part is not None:
            if part.device is not None and part.kind in ("computing", "link"):
                kept = self._keep(self._plan, seen, (part.device, part.target))
                part = part.model_copy(update={"kept": kept})
            run.callbacks.note(first_steps_text(compared, part))
        update_attempt(run.journal, first_steps=compared.model_copy(update={"part": part}))
