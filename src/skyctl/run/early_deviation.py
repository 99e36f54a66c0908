"""A note after a run's first steps, where they are not as predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from skyctl.compare.deviation import describe_deviation
from skyctl.compare.number_format import format_estimate
from skyctl.records.measurement import Measurement
from skyctl.run.callbacks import RunCallbacks, StepProgress

EARLY_STEPS = 5
"""After so many steps they are compared with the prediction, the warm-up step left out."""
EARLY_DEVIATION = 0.1
"""How far a step may be off, relative to the prediction, without a note."""


def with_early_deviation_note(callbacks: RunCallbacks, figures: Callable[[], Measurement]) -> RunCallbacks:
    """The same callbacks, with a note after a few steps that says why they are not as predicted.

    Args:
        figures: the measurement so far, with its differences.
    """

    def step(progress: StepProgress) -> None:
        callbacks.step(progress)
        if progress.step + 1 != EARLY_STEPS or progress.steps < 2 * EARLY_STEPS:
            return
        done = figures()
        took_s, planned_s = done.iteration_s.median, done.predicted_iteration_s
        if planned_s > 0 and abs(took_s / planned_s - 1) > EARLY_DEVIATION:
            predicted = format_estimate(planned_s, done.predicted_interval)
            unit = progress.unit
            callbacks.note(
                f"after {EARLY_STEPS} {unit}s: a {unit} takes {took_s:.4f} s, predicted {predicted}"
            )
            for sentence in describe_deviation(done):
                callbacks.note(f"  {sentence}")

    return replace(callbacks, step=step)
