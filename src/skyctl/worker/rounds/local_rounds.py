"""Rounds: a pipeline makes local steps by itself, then weights are averaged with those of other pipelines.

Local SGD (arXiv 1805.09767) where pipelines share each batch; FedAvg (arXiv 1602.05629) where each is an
owner's, with data of its own; with ``prox_mu`` FedProx (arXiv 1812.06127): the gradient of µ/2 · ‖w − w₀‖² is
added to the local one, w₀ being the weights at the round's start, and the work of stragglers, owners that
make fewer steps than asked, is kept, weighted by its samples. With ``outer_lr`` or ``outer_momentum`` an
outer optimizer steps along what the average changes (DiLoCo, arXiv 2311.08105; ``outer_optimizer``).

With H local steps a round, local step j of round r trains on batch r · H + j of the pipeline's own stream,
whatever came of earlier rounds: so a run that goes on from a checkpoint trains on the batches that it would
have had.

A step of the run is a round: its event, validations and checkpoints follow the average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from skyctl.worker.pipeline.executor import Executor
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.worker.rank_order import RoundOptions
from skyctl.worker.rounds.outer_optimizer import OuterOptimizer
from skyctl.worker.rounds.round_start import RoundStart
from skyctl.worker.rounds.step_budget import StepBudget, make_owner_steps
from skyctl.worker.rounds.weight_average import ENDS, ENDS_NEXT, GOES_ON, WeightAverage
from skyctl.worker.stage_group import StageGroup
from skyctl.worker.updates.stage_update import StageUpdate
from skyctl.worker.updates.step_report import StepReport

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload

Tensor = torch.Tensor


class LocalRounds:
    """Makes rounds in the place of a training loop's steps.

    Args:
        executor: makes the local steps, without a sum.
        update: that its steps end with.
        average: of the weights at a round's end; None: this pipeline is alone.
        outer: steps along what the average changes; None: the weights become the average.
        seeder: of the executor's layers, told the number of each local step.
        budget: how many local steps it makes in a round.
        first_round: of this attempt.
    """

    def __init__(
        self,
        executor: Executor,
        update: StageUpdate,
        average: WeightAverage | None,
        options: RoundOptions,
        *,
        outer: OuterOptimizer | None = None,
        seeder: LayerSeeder,
        budget: StepBudget,
        first_round: int = 0,
    ) -> None:
        self._executor, self._update = executor, update
        self._average, self._options, self._outer = average, options, outer
        self._seeder, self._budget = seeder, budget
        self._samples = sum(executor.microbatch_sizes)
        self._next_batch = first_round * options.steps
        self._asked_to_end = False
        self._last_part = 0.0
        self._start: RoundStart | None = None if outer is None else outer.start
        needed = options.owner is not None or options.prox_mu or (average is not None and average.needs_start)
        if needed and self._start is None:
            self._start = RoundStart(executor.stage.layers)
        if (start := self._start) is not None and options.prox_mu:
            update.terms.append(lambda: start.add_difference(options.prox_mu))

    def step(
        self,
        step: int,
        next_batch: Callable[[], tuple[Any, Any]],
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> StepReport:
        """One round; arguments as ``Executor.step``. Its report is of all local steps and the average.

        A run that is told to end does so with this round, or, where the stages of a pipeline have to tell
        each other first, with the next.
        """
        executor, report = self._executor, StepReport()
        if self._start is not None:
            self._start.take()
        ends = self._asked_to_end
        wanted = self._budget.begin(step, report)
        counted = wanted == self._options.steps or not self._options.drop_stragglers
        steps_made, loss = 0, 0.0
        while steps_made < (wanted if counted else 0):
            self._skip_to(step * self._options.steps + steps_made, next_batch)
            self._next_batch += 1
            self._seeder.step = number = step * self._options.steps + steps_made
            self._executor.step(
                number,
                next_batch,
                stop_requested=partial(bool, ends),
                while_waiting=while_waiting,
                report=report,
            )
            ends = ends or report.is_last
            steps_made += 1
            loss += report.loss or 0.0
            if steps_made < wanted and self._budget.is_spent(step, report):
                break
        if self._options.drop_stragglers and steps_made < self._options.steps:
            counted = False
        if not steps_made:  # others are busy now
            self._skip_to((step + 1) * self._options.steps, next_batch)
        samples = self._samples * steps_made if counted else 0
        report.local_steps, report.samples = steps_made, samples
        self._end(step, report, samples, ends=ends, stop_requested=stop_requested)
        if executor.is_last:
            report.loss = loss / steps_made if steps_made else None
            self._share_loss(report, samples)
        else:
            report.loss = None
        return report

    def average_figures(self, step: int) -> None:
        """Nothing: they were averaged with the weights."""

    def reset_residuals(self) -> None:
        """Drops what a checkpoint does not hold, as a run that resumes here has none of it."""
        self._executor.reset_residuals()
        if self._average is not None:
            self._average.reset_residuals()

    def _skip_to(self, batch: int, next_batch: Callable[[], tuple[Any, Any]]) -> None:
        """Leaves out the batches before that one, of rounds that this pipeline had no or less part in."""
        fetches = self._executor.stage_io.inputs is None or self._executor.is_last
        while self._next_batch < batch:
            if fetches:
                next_batch()
            self._next_batch += 1

    def _end(
        self,
        step: int,
        report: StepReport,
        samples: int,
        *,
        ends: bool,
        stop_requested: Callable[[], bool],
    ) -> None:
        """Averages the weights, and settles whether the run ends."""
        progress = self._executor.progress
        progress.phase = f"round {step}, the average of the weights"
        asked = stop_requested()
        end = ENDS_NEXT if asked or ends else GOES_ON
        if end == ENDS_NEXT and (self._alone or (ends and report.local_steps)):
            end = ENDS  # all stages of this pipeline know: its forwards have told them
        total = samples
        if self._average is not None:
            with progress.waits():
                average = self._average.average(step, samples, end, self._start)
            report.idle_s += average.idle_s
            report.transfer_s += average.transfer_s
            report.sync_s = average.idle_s + average.transfer_s
            total, end = average.samples, average.end
        if not total and self._start is not None:
            self._start.restore()
        elif self._outer is not None:
            progress.phase = f"round {step}, the outer step"
            report.optimizer_s += self._update.timer.run(self._outer.step).wall_s
        report.total_samples = total
        self._asked_to_end = end == ENDS_NEXT
        report.is_last = end == ENDS
        optimizer = self._update.optimizer
        if self._options.owner is not None and optimizer is not None:
            optimizer.state.clear()  # what it has learnt of this owner's data stays in no checkpoint

    @property
    def _alone(self) -> bool:
        """Whether all pipelines have one stage: then all ranks agree at once."""
        single = self._executor.stage_io.inputs is None and self._executor.is_last
        return single and (self._average is None or self._average.groups == 1)

    def _share_loss(self, report: StepReport, samples: int) -> None:
        """This pipeline's part of the loss: of its samples, out of all.

        Of a round in which nobody's work counts it is the part of the round before.
        """
        total = report.total_samples or 0
        if total:
            self._last_part = (report.loss or 0.0) * samples / total
        report.own_loss = report.loss
        report.loss = self._last_part


def make_outer_optimizer(options: RoundOptions | None, layers: Sequence[nn.Module]) -> OuterOptimizer | None:
    """The outer optimizer of a stage's layers; None if its weights become the average itself."""
    if options is None or (options.outer_lr == 1 and not options.outer_momentum):
        return None
    return OuterOptimizer(layers, options.outer_lr, options.outer_momentum)


def make_rounds(
    options: RoundOptions,
    executor: Executor,
    update: StageUpdate,
    average: WeightAverage | None,
    outer: OuterOptimizer | None,
    workload: Workload,
    seeder: LayerSeeder,
    first_round: int,
    stages: StageGroup,
) -> LocalRounds:
    """Returns the maker of a workload's rounds, in the place of steps."""
    model = workload.model
    owner_steps = make_owner_steps(
        model.functions.get("local_steps"), options.owner, model.source_name, workload.user_errors
    )
    budget = StepBudget(options, workload.spec.seed, stages, executor.progress, owner_steps)
    return LocalRounds(
        executor,
        update,
        average,
        options,
        outer=outer,
        seeder=seeder,
        budget=budget,
        first_round=first_round,
    )
