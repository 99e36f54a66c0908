"""The steps of a run that have ended, over all of its attempts, and the measurement of all of them."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from skyctl.records.measurement import Measurement, StepMeasurement, ValidationMeasurement, quantiles
from skyctl.records.plan import Plan
from skyctl.run.callbacks import StepProgress
from skyctl.run.journal import read_validation


@dataclass
class StepHistory:
    """``steps``: by number, (loss, seconds); ``validation``: by the step before."""

    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    validation: dict[int, ValidationMeasurement] = field(default_factory=dict)

    @classmethod
    def read(cls, metrics: Path) -> StepHistory:
        """From a run's metrics.jsonl; what can't be read of it is left out."""
        made = cls()
        with suppress(OSError), metrics.open(encoding="utf-8") as lines:
            for text in lines:
                with suppress(ValueError, KeyError, TypeError):
                    line = json.loads(text)
                    made.steps[int(line["step"])] = (float(line["loss"]), float(line["iteration_s"]))
                    if (validation := read_validation(line)) is not None:
                        made.validation[validation.step] = validation
        return made

    def add(self, progress: StepProgress) -> None:
        """A step that has ended, with its validation where there was one."""
        self.steps[progress.step] = (progress.loss, progress.iteration_s)
        if progress.validation is not None:
            self.validation[progress.step] = progress.validation

    @property
    def count(self) -> int:
        """Steps up to the newest one known; a few before it may be missing (``StepCollector.heard``)."""
        return max(self.steps, default=-1) + 1

    def alone(self, run_id: str, plan: Plan, weights: str | None, attempts: int) -> Measurement:
        """The measurement if the last attempt had nothing left to train: all steps, nothing of its ranks."""
        times = [iteration_s for _, (_, iteration_s) in sorted(self.steps.items())]
        loss, _ = self.steps[max(self.steps)]
        empty = Measurement(
            run_id=run_id,
            strategy=plan.strategy,
            steps=(),
            iteration_s=quantiles(times[1:] or times),
            predicted_iteration_s=plan.predicted.iteration_s,
            predicted_interval=plan.predicted.interval,
            replicas=(),
            final_loss=loss,
            attempts=attempts,
            weights=weights,
            backend=None if plan.backend is None else plan.backend.backend,
        )
        return self.of_all(empty, attempts)

    def of_all(self, done: Measurement, attempts: int) -> Measurement:
        """The last attempt's measurement, with the steps and validations of earlier attempts added.

        Args:
            done: of the last attempt; where it made a step again, its figures count.
            attempts: how many the run had.
        """
        steps = {item.step: item for item in done.steps}
        for step, (loss, iteration_s) in self.steps.items():
            steps.setdefault(step, StepMeasurement(step=step, loss=loss, iteration_s=iteration_s))
        validation = {**self.validation, **{item.step: item for item in done.validation}}
        return done.model_copy(
            update={
                "steps": tuple(steps[step] for step in sorted(steps)),
                "validation": tuple(item for step, item in sorted(validation.items()) if step in steps),
                "attempts": attempts,
            }
        )
