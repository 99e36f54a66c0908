"""The steps of one rank: train, report, validate, write a checkpoint, until the end or a word to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from skyctl.worker.checkpointing import Checkpointer
from skyctl.worker.clipping import Clip
from skyctl.worker.executor import Executor, StepReport
from skyctl.worker.feed import Feed
from skyctl.worker.machine import peak_memory_bytes
from skyctl.worker.optimizing import Rate
from skyctl.worker.randomness import Randomness
from skyctl.worker.validating import Validator
from skyctl.workload.recipe import Recipe


@dataclass
class Steps:
    """What one rank does in each step, and between two of them.

    Args:
        send: an event to the launcher.
        stops: whether it has been told to end; asked by the first rank only, None on the others.
    """

    executor: Executor
    recipe: Recipe
    rate: Rate
    randomness: Randomness
    send: Callable[[dict[str, Any]], None]
    stops: Callable[[], bool] | None
    clip: Clip | None = None
    validator: Validator | None = None
    checkpointer: Checkpointer | None = None

    def run(self, feed: Feed, step0: int, steps: int) -> int:
        """Steps ``step0`` … ``steps`` − 1; returns how many of the run's steps are done at the end.

        What is done after a step (validation, a checkpoint) is in no step's time.
        """
        executor = self.executor
        began = time.perf_counter()
        for step in range(step0, steps):
            self.randomness.step = step
            if self.clip is not None:
                self.clip.begin(step)
            report = executor.step(
                step,
                feed.get,
                ending=self.stops or (lambda: False),
                meanwhile=feed.ahead if step + 1 < steps else lambda: None,
            )
            ended = time.perf_counter()
            last = step + 1 == steps
            validates = self.recipe.validates(step, last=last) and not report.last
            keeps = self.checkpointer is not None and self.checkpointer.due(
                step + 1, early=report.last, last=last
            )
            self._report(step, ended - began, report, validates=validates)
            self.rate.advance()
            if (validates or keeps) and executor.recorder is not None:
                executor.recorder.apart()
            if validates:
                self._validate(step)
            if keeps:  # after the validation: who goes on from here need not repeat it
                self._keep(step)
            began = time.perf_counter() if validates or keeps else ended
            if report.last:
                return step + 1
        return steps

    def _validate(self, step: int) -> None:
        assert self.validator is not None
        began = time.perf_counter()
        loss = self.validator.run(step, self.executor)
        if loss is not None:
            wall_s = time.perf_counter() - began
            self.send({"event": "validation", "step": step, "loss": loss, "wall_s": wall_s})

    def _keep(self, step: int) -> None:
        assert self.checkpointer is not None
        self.executor.phase = f"the checkpoint after step {step}"
        self.send(self.checkpointer.write(step + 1))

    def _report(self, step: int, iteration_s: float, report: StepReport, *, validates: bool) -> None:
        self.send(
            {
                "event": "step",
                "step": step,
                "iteration_s": iteration_s,
                "compute_s": max(0.0, iteration_s - report.transfer_s - report.idle_s),
                "transfer_s": report.transfer_s,
                "idle_s": report.idle_s,
                "forward_s": report.forward_s,
                "backward_s": report.backward_s,
                "weight_s": report.weight_s,
                "optimizer_s": report.optimizer_s,
                "input_message_s": median(report.inputs_s) if report.inputs_s else None,
                "gradient_message_s": median(report.gradients_s) if report.gradients_s else None,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "learning_rate": self.rate.now,
                "validates": validates,
                "samples": sum(self.executor.sizes),
                "peak_memory_bytes": peak_memory_bytes(self.executor.device),
            }
        )
