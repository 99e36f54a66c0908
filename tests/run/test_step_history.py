"""All steps of a run, whichever attempt they were done in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from skyctl.records.interval import Interval
from skyctl.run.step_metrics import StepHistory


def test_an_attempt_that_had_nothing_left_to_train() -> None:
    """What it went on from was the last step's checkpoint: the figures are those of the steps before."""
    history = StepHistory({0: (4.0, 9.0), 1: (3.0, 1.0), 2: (2.0, 2.0), 3: (1.0, 3.0)}, {1: 0.5})
    sure = Interval(low_s=1.4, high_s=1.8)
    plan: Any = SimpleNamespace(strategy="even", predicted=SimpleNamespace(iteration_s=1.5, interval=sure))
    done = history.alone("run", plan, "weights.safetensors", 2)
    assert [(step.step, step.loss) for step in done.steps] == [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]
    assert (done.final_loss, done.iteration_s.median, done.attempts) == (1.0, 2.0, 2)
    assert (done.predicted_iteration_s, done.predicted_interval) == (1.5, sure)
    assert (done.replicas, done.weights) == ((), "weights.safetensors")
    assert [(one.step, one.loss) for one in done.validation] == [(1, 0.5)]
