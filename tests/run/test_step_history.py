"""All steps of a run, whichever attempt they were done in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyctl.records.interval import Interval
from skyctl.records.measurement import ValidationMeasurement
from skyctl.run.callbacks import StepProgress
from skyctl.run.journal import metrics_line
from skyctl.run.step_history import StepHistory

VALIDATION = ValidationMeasurement(step=1, loss=0.5, metrics={"accuracy": 0.25, "odd": None})


def test_an_attempt_that_had_nothing_left_to_train() -> None:
    """It went on from the last step's checkpoint: the figures are those of the steps before."""
    history = StepHistory({0: (4.0, 9.0), 1: (3.0, 1.0), 2: (2.0, 2.0), 3: (1.0, 3.0)}, {1: VALIDATION})
    sure = Interval(low_s=1.4, high_s=1.8)
    predicted = SimpleNamespace(iteration_s=1.5, interval=sure)
    plan: Any = SimpleNamespace(strategy="even", backend=None, predicted=predicted)
    done = history.alone("run", plan, "weights.safetensors", 2)
    assert [(step.step, step.loss) for step in done.steps] == [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]
    assert (done.final_loss, done.iteration_s.median, done.attempts) == (1.0, 2.0, 2)
    assert (done.predicted_iteration_s, done.predicted_interval) == (1.5, sure)
    assert (done.replicas, done.weights) == ((), "weights.safetensors")
    assert done.validation == (VALIDATION,)


def test_a_run_that_goes_on_knows_its_validations_from_its_file(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    figures = {"steps": 3, "iteration_s": 1.0, "samples_per_s": 8.0, "left_s": None}
    lines = [
        metrics_line(StepProgress(step=0, loss=4.0, **figures)),
        metrics_line(StepProgress(step=1, loss=3.0, validation=VALIDATION, **figures)),
        {"step": 2, "loss": 2.0, "iteration_s": 1.0, "validation_loss": 0.3, "validation_metrics": ["?"]},
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = StepHistory.read(metrics)
    assert history.count == 3
    assert history.validation == {1: VALIDATION}


def test_steps_of_which_nobody_told_do_not_hide_those_after_them() -> None:
    """Else a run that was restored from beyond them would go back to before them with its next restart."""
    assert StepHistory({0: (4.0, 1.0), 1: (3.0, 1.0), 5: (1.0, 1.0)}).count == 6
    assert StepHistory().count == 0
