"""A run's steps over all of its attempts: of a step that was done again, the last counts."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from skyctl.compare.stats import quantiles
from skyctl.launch.events import Progress
from skyctl.records.measurement import Measurement, StepMeasurement, ValidationMeasurement
from skyctl.records.plan import Plan


@dataclass
class History:
    """``steps``: by number, (loss, seconds); ``validation``: by the step before, the loss."""

    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)

    @classmethod
    def read(cls, metrics: Path) -> History:
        """From a run's metrics.jsonl; what can't be read of it is left out."""
        made = cls()
        with suppress(OSError):
            for text in metrics.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    line = json.loads(text)
                    made.steps[int(line["step"])] = (float(line["loss"]), float(line["iteration_s"]))
                    if line.get("validation_loss") is not None:
                        made.validation[int(line["step"])] = float(line["validation_loss"])
        return made

    def add(self, progress: Progress) -> None:
        """A step that has ended, with its validation where there was one."""
        self.steps[progress.step] = (progress.loss, progress.iteration_s)
        if progress.validation_loss is not None:
            self.validation[progress.step] = progress.validation_loss

    @property
    def count(self) -> int:
        """Steps from the first on without a gap."""
        done = 0
        while done in self.steps:
            done += 1
        return done

    def alone(self, run_id: str, plan: Plan, weights: str | None, attempts: int) -> Measurement:
        """Where the last attempt had nothing left to train: all steps, and nothing of its ranks."""
        times = [iteration_s for _, (_, iteration_s) in sorted(self.steps.items())]
        loss, _ = self.steps[max(self.steps)]
        empty = Measurement(
            run_id=run_id,
            strategy=plan.strategy,
            steps=(),
            iteration_s=quantiles(times[1:] or times),
            predicted_iteration_s=plan.predicted.iteration_s,
            replicas=(),
            final_loss=loss,
            attempts=attempts,
            weights=weights,
        )
        return self.of_all(empty, attempts)

    def of_all(self, done: Measurement, attempts: int) -> Measurement:
        """The last attempt's measurement with all steps there were."""
        steps = {one.step: one for one in done.steps}
        for step, (loss, iteration_s) in self.steps.items():
            steps.setdefault(step, StepMeasurement(step=step, loss=loss, iteration_s=iteration_s))
        losses = {**self.validation, **{one.step: one.loss for one in done.validation}}
        return done.model_copy(
            update={
                "steps": tuple(steps[step] for step in sorted(steps)),
                "validation": tuple(
                    ValidationMeasurement(step=step, loss=losses[step])
                    for step in sorted(losses)
                    if step in steps
                ),
                "attempts": attempts,
            }
        )
