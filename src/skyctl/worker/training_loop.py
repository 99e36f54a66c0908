"""The training loop of one rank: steps, and what follows a step: its event, validation, a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch

from skyctl.agent.task_events import to_message
from skyctl.turns.turn_client import NO_TURNS, DeviceTurns, NoTurns
from skyctl.worker.checkpointer import Checkpointer
from skyctl.worker.experts.trunk_experts import TrunkExperts
from skyctl.worker.pipeline.executor import Executor
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.worker.pipeline.validation import Validator
from skyctl.worker.rank_environment import peak_memory_bytes
from skyctl.worker.rank_events import BatchSketch, StepEvent, ValidationEvent
from skyctl.worker.stage_group import StageGroup
from skyctl.worker.updates.best_validation import BestSoFar
from skyctl.worker.updates.lr_scheduler import LearningRateScheduler
from skyctl.worker.updates.step_report import StepReport
from skyctl.workload.recipe import Recipe


class BatchReader(Protocol):
    """A source of batches: ``Prefetcher``, ``elastic_steps.ElasticBatches``."""

    def get(self) -> tuple[Any, Any]:
        """The next one, as (inputs, targets)."""

    def prefetch(self) -> None:
        """Fetches the next one now, where that is safe."""


class StepMaker(Protocol):
    """The maker of a run's steps, or rounds: ``Executor``, ``local_rounds.LocalRounds``."""

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
        stages: of the one pipeline whose validation says which checkpoint is best; None: another's does, or
            each owner's, or nobody validates.
        is_only_pipeline: there are no others, which can't know whether a validation was the best yet.
        is_first: whether it is this rank that validates now; None: whoever has a validator does.
        best: the best validation so far; other pipelines tell of theirs.
        turns: of the device, which is told what is left to do.
        experts: on hosts; None: there are none.
        is_out_of_patience: the run ends with the next step, as no validation was better for too long.
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
    stages: StageGroup | None = None
    is_only_pipeline: bool = True
    is_first: Callable[[], bool] | None = None
    best: BestSoFar = field(default_factory=BestSoFar)
    turns: DeviceTurns | NoTurns = NO_TURNS
    experts: TrunkExperts | None = None
    is_out_of_patience: bool = False

    def run(self, batches: BatchReader, first_step: int, steps: int) -> int:
        """Makes steps [first_step, steps); returns how many of the run's steps are done at the end.

        Time spent after a step (validation, a checkpoint) counts in no step.
        """
        executor, maker = self.executor, self.maker
        self._check_patience(first_step)
        began = time.perf_counter()
        for step in range(first_step, steps):
            self.seeder.step = step
            if self.experts is not None:
                self.experts.begin(step)
            report = maker.step(
                step,
                batches.get,
                stop_requested=self._stop_requested,
                while_waiting=batches.prefetch if step + 1 < steps else lambda: None,
            )
            if self.experts is not None:
                self.experts.end()
            ended = time.perf_counter()
            self.turns.tell_progress(step + 1 - first_step, steps - first_step)
            last = step + 1 == steps
            validation_due = self.recipe.validates(step, last=last) and not report.is_last
            validates = validation_due and self.validator is not None and self._is_first()
            saves = self.checkpointer is not None and (
                self.checkpointer.due(step + 1, early=report.is_last, last=last)
                or (validation_due and not self.is_only_pipeline)
            )
            self._send_step(step, ended - began, report, validates=validates)
            if report.is_applied:
                self.scheduler.advance()
            if (validates or saves) and executor.recorder is not None:
                executor.recorder.end_step_early()
            if validation_due or saves or last or report.is_last:
                maker.average_figures(step)
            is_best = validates and self._validate(step)
            saves = saves or (is_best and self.checkpointer is not None)
            if saves:  # after the validation: a run that resumes from here need not repeat it
                self._save_checkpoint(step, best=is_best)
            began = time.perf_counter() if validates or saves else ended
            if report.is_last:
                return step + 1
        return steps

    def _stop_requested(self) -> bool:
        return self.stop_requested is not None and (self.is_out_of_patience or self.stop_requested())

    def _is_first(self) -> bool:
        return self.is_first is None or self.is_first()

    def _check_patience(self, done: int) -> None:
        if self.stages is not None:
            self.is_out_of_patience = self.recipe.loses_patience(done, self.best.step)

    def _validate(self, step: int) -> bool:
        """Validates; returns whether the loss is the best so far, on all stages alike."""
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
        if self.stages is None:
            return False
        loss = torch.tensor([validation.loss if validation is not None else 0.0], dtype=torch.float64)
        self.stages.all_reduce(loss)  # the last stage's is the only one
        is_best = self.best.note(step + 1, loss.item())
        self._check_patience(step + 1)
        return is_best

    def _save_checkpoint(self, step: int, *, best: bool) -> None:
        assert self.checkpointer is not None
        self.executor.progress.phase = f"the checkpoint after step {step}"
        if self.experts is not None:
            self.experts.fetch()
        self.send(to_message(self.checkpointer.write(step + 1, best=best)))
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
