"""An attempt's first steps, compared with its plan's prediction while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from skyctl.learning.corrections import Subject
from skyctl.learning.first_steps import compare_first_steps, first_steps_text
from skyctl.learning.observations import LEAST_STEPS, tells_layer_times
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.run.callbacks import RunCallbacks, StepProgress
from skyctl.run.event_sink import EventSink, update_attempt

FIRST_STEPS = 10
"""So many steps are compared, the attempt's warm-up step left out; of a shorter attempt those that it has."""

KeepPart = Callable[[Plan, Measurement, Subject], bool]
"""Adds what an attempt saw of a device or a link to the cluster's profile; whether it did."""


def with_first_steps(
    callbacks: RunCallbacks,
    plan: Plan,
    first: int,
    figures: Callable[[], Measurement],
    sink: EventSink,
    keep: KeepPart,
) -> RunCallbacks:
    """The same callbacks, with a note after an attempt's first steps where they are not as predicted.

    The comparison goes into the attempt's entry of the run's state. What the part at fault took goes into
    the profile at once, so that plans made meanwhile know of it.

    Args:
        plan: with its prediction's interval; steps of any other, and those whose layers' times tell nothing,
            are not compared.
        first: the step that the attempt begins with.
        figures: the measurement so far.
    """
    if plan.predicted.interval is None or not tells_layer_times(plan):
        return callbacks

    def step(progress: StepProgress) -> None:
        callbacks.step(progress)
        counted, is_last = progress.step - first, progress.step + 1 == progress.steps
        if counted != FIRST_STEPS and not (is_last and LEAST_STEPS <= counted < FIRST_STEPS):
            return
        done = figures()
        found = compare_first_steps(plan, done)
        if found is None:
            return
        part = found.part
        if part is not None:
            if part.device is not None and part.kind in ("computing", "link"):
                part = part.model_copy(update={"kept": keep(plan, done, (part.device, part.target))})
            callbacks.note(first_steps_text(found, part))
        update_attempt(sink, first_steps=found.model_copy(update={"part": part}))

    return replace(callbacks, step=step)
