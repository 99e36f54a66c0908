"""The training loop of one rank: steps, and what follows a step: its event, validation, a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from skyctl.agent.task_events import to_message
from skyctl.worker.batches.sample_batches import Prefetcher
from skyctl.worker.checkpointer import Checkpointer
from skyctl.worker.pipeline.executor import Executor
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.worker.pipeline.validation import Validator
from skyctl.worker.rank_environment import peak_memory_bytes
from skyctl.worker.rank_events import BatchSketch, StepEvent, ValidationEvent
from skyctl.worker.updates.lr_scheduler import LearningRateScheduler
from skyctl.worker.updates.step_report import StepReport
from skyctl.workload.recipe import Recipe


class StepMaker(Protocol):
    """What makes a run's steps, or rounds: ``Executor``, ``local_rounds.LocalRounds``."""

    def step(
        self,
        step: int,
        next_batch: Callable[[], tuple[Any, Any]],
        *,
        stop_requested: Callable[[], bool],
        while_waiting: Callable[[], None],
    ) -> StepReport:
        """Makes one, and updates the weights."""

    def average_figures(self, step: int) -> None:
        """Gives all replicas of these layers the mean of their norms' running figures."""

    def reset_residuals(self) -> None:
        """Drops what a checkpoint does not hold."""


@dataclass
class TrainingLoop:
    """Everything one rank does in each step and after it.

    Args:
        send: sends an event to the launcher.
        stop_requested: whether the launcher wants an early end; on the first rank only, None on the others.
        sketch_of: the sketch of a step's batch; None where the stage has no batches.
        validation_batch: the sketch of the first held-out batch, sent with the first step.
        maker: makes the steps: the executor, or what makes rounds with it.
    """

    executor: Executor
    maker: StepMaker
    recipe: Recipe
    scheduler: LearningRateScheduler
    seeder: LayerSeeder
    send: Callable[[dict[str, Any]], None]
    stop_requested: Callable[[], bool] | None
    validator: Validator | None = None
    checkpointer: Checkpointer | None = None
    sketch_of: Callable[[int], BatchSketch | None] = lambda _step: None
    validation_batch: BatchSketch | None = None

    def run(self, batches: Prefetcher, first_step: int, steps: int) -> int:
        """Makes steps [first_step, steps); returns how many of the run's steps are done at the end.

        Time spent after a step (validation, a checkpoint) counts in no step.
        """
        executor, maker = self.executor, self.maker
        began = time.perf_counter()
        for step in range(first_step, steps):
            self.seeder.step = step
            report = maker.step(
                step,
                batches.get,
                stop_requested=self.stop_requested or (lambda: False),
                while_waiting=batches.prefetch if step + 1 < steps else lambda: None,
            )
            ended = time.perf_counter()
            last = step + 1 == steps
            validation_due = self.recipe.validates(step, last=last) and not report.is_last
            validates = validation_due and self.validator is not None
            saves = self.checkpointer is not None and self.checkpointer.due(
                step + 1, early=report.is_last, last=last
            )
            self._send_step(step, ended - began, report, validates=validates)
            if report.is_applied:
                self.scheduler.advance()
            if (validates or saves) and executor.recorder is not None:
                executor.recorder.end_step_early()
            if validation_due or saves or last or report.is_last:
                maker.average_figures(step)
            if validates:
                self._validate(step)
            if saves:  # after the validation: a run that resumes from here need not repeat it
                self._save_checkpoint(step)
            began = time.perf_counter() if validates or saves else ended
            if report.is_last:
                return step + 1
        return steps

    def _validate(self, step: int) -> None:
        assert self.validator is not None
        began = time.perf_counter()
        validation = self.validator.run(step)
        if validation is not None:
            wall_s = time.perf_counter() - began
            self.send(
                to_message(
                    ValidationEvent(step, validation.loss, wall_s, validation.metrics, validation.samples)
                )
            )

    def _save_checkpoint(self, step: int) -> None:
        assert self.checkpointer is not None
        self.executor.progress.phase = f"the checkpoint after step {step}"
        self.send(to_message(self.checkpointer.write(step + 1)))
        self.maker.reset_residuals()

    def _send_step(self, step: int, iteration_s: float, report: StepReport, *, validates: bool) -> None:
        inputs_s, gradients_s = report.input_messages_s, report.gradient_messages_s
        event = StepEvent(
            step=step,
            iteration_s=iteration_s,
            compute_s=max(0.0, iteration_s - report.transfer_s - report.idle_s),
            transfer_s=report.transfer_s,
            idle_s=report.idle_s,
            forward_s=report.forward_s,
            backward_s=report.backward_s,
            weight_s=report.weight_s,
            optimizer_s=report.optimizer_s,
            input_message_s=median(inputs_s) if inputs_s else None,
            gradient_message_s=median(gradients_s) if gradients_s else None,
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=self.scheduler.learning_rate,
            validates=validates,
            samples=sum(self.executor.microbatch_sizes) if report.samples is None else report.samples,
            peak_memory_bytes=peak_memory_bytes(self.executor.device),
            sync_s=report.sync_s,
            repeats=report.repeats,
            local_steps=report.local_steps,
            own_loss=report.own_loss,
            ahead=report.ahead,
            batch=self.sketch_of(step),
            validation_batch=self.validation_batch,
        )
        self.validation_batch = None
        self.send(to_message(event))
