"""A run's figures with what was off, and a word about it while the run is still young."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from skyctl.compare.off import differences, sentences
from skyctl.launch.events import Progress, Watcher
from skyctl.records.measurement import Measurement
from skyctl.schedule.playing import Play

EARLY_STEPS = 5
"""After so many steps the prediction is looked at, the warm-up step left out."""
EARLY_OFF = 0.1
"""How far the step may be off without a word."""


def explained(play: Play, done: Measurement) -> Measurement:
    """The same with ``differences``."""
    return done.model_copy(update={"differences": differences(play, done)})


def with_early_word(watcher: Watcher, figures: Callable[[], Measurement]) -> Watcher:
    """The same watcher, which is told once, after a few steps, why they are not as predicted.

    Args:
        figures: the measurement so far, with its differences.
    """

    def step(progress: Progress) -> None:
        watcher.step(progress)
        if progress.step + 1 != EARLY_STEPS or progress.steps < 2 * EARLY_STEPS:
            return
        done = figures()
        took_s, planned_s = done.iteration_s.median, done.predicted_iteration_s
        if planned_s > 0 and abs(took_s / planned_s - 1) > EARLY_OFF:
            watcher.note(
                f"after {EARLY_STEPS} steps: a step takes {took_s:.4f} s, predicted {planned_s:.4f} s"
            )
            for sentence in sentences(done):
                watcher.note(f"  {sentence}")

    return replace(watcher, step=step)
