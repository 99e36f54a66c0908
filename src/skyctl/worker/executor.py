"""Executes a schedule on real tensors: the actions, in their order, that the simulator plays on numbers.

What makes the contract's model of time true: receives are posted ahead, sends return at once, and between two
actions there is nothing but waiting for the next one's input. Backwards run in the order 0…M−1 under every
schedule, and so do weight gradients, so that they are summed in one order whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from skyctl.device.device_timer import DeviceTimer
from skyctl.schedule.actions import BACKWARD, FORWARD, OPTIMIZER, WEIGHT_GRADIENTS, actions
from skyctl.worker.batches import split_inputs, split_targets
from skyctl.worker.delayed_sync import DelayedSync
from skyctl.worker.gradient_sync import GradientSync, SyncReport
from skyctl.worker.messages import LAST_STEP, MessageReceiver, ReceivedMessage
from skyctl.worker.predicted_weights import PredictedWeights
from skyctl.worker.stage import PipelineStage
from skyctl.worker.stage_io import StageIO
from skyctl.worker.stale_sync import StaleSync
from skyctl.worker.trace_recorder import SUM, TraceRecorder
from skyctl.workload.structures import map_tensors

Tensor = torch.Tensor


def _do_nothing() -> None:
    """What is called where there is nothing to do."""


@dataclass
class StepReport:
    """One step of one stage; a step's events are made of it (``training_loop``).

    Attributes:
        forward_s, backward_s, optimizer_s: the layers' own time (the loss's counts as forward).
        weight_s: the part of ``backward_s`` that was deferred (W of ``zero-bubble``).
        idle_s, transfer_s: waiting for a neighbour, and for the network (see ``messages``).
        sync_s: where pipelines sum their gradients, from this stage's last backward to the end of the sum
            that is then waited for; also in ``idle_s`` (until all have begun it) and ``transfer_s``.
        loss: on the last stage, the mean over the batch, or this pipeline's part of it.
        grad_norm: where gradients are clipped, the global norm before; of the last ones that were applied.
        ahead: with a parameter server, by how many clocks it was ahead of the slowest when it might go on.
        is_last: the pipeline ends with this step.
        is_applied: the step's own gradients are applied at its end; with a delay they may not be yet.
        repeats: how often its microbatches were made again (``gradient_sync``); all other figures are of all.
        local_steps, samples, own_loss: of a round (``local_rounds``), the steps that were made in it, the
            samples that count, and on the last stage the mean loss of this pipeline alone.
        total_samples: that count of all pipelines.
        input_messages_s, gradient_messages_s: of the messages that were waited for from before their start,
            the seconds on the way.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    optimizer_s: float = 0.0
    idle_s: float = 0.0
    transfer_s: float = 0.0
    sync_s: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    ahead: int | None = None
    is_last: bool = False
    is_applied: bool = True
    repeats: int = 0
    local_steps: int | None = None
    samples: int | None = None
    total_samples: int | None = None
    own_loss: float | None = None
    input_messages_s: list[float] = field(default_factory=list)
    gradient_messages_s: list[float] = field(default_factory=list)


@dataclass
class Executor:
    """Runs the actions of one stage, step by step.

    Args:
        microbatch_sizes: samples of each microbatch of this pipeline.
        batch_size: samples of the step's whole batch; None: those microbatches are all there are.
        in_flight: how many microbatches the stage keeps between forward and backward.
        deferred_weights: under ``zero-bubble``, how many microbatches the weight gradients lag behind.
        optimizer: None for a stage without parameters.
        phase: what it is doing, for an error's message.
        waiting: whether it waits for a message just now.
        is_told_to_end: the stage before has said that the run ends.
        sync: sums the gradients with those of other pipelines, or pushes them to a parameter server.
        before_update: called between the last backward, with its sum, and the optimizer's step; with a
            parameter server before the push.
        after_delayed_update: called after an update by the gradients of the step before.
        predicted: with a delay, the weights that steps are computed with; None: those that there are.
        recorder: told what was done when, where a trace is wanted.
    """

    stage: PipelineStage
    stage_io: StageIO
    timer: DeviceTimer
    microbatch_sizes: Sequence[int]
    schedule: str
    in_flight: int
    optimizer: torch.optim.Optimizer | None
    is_last: bool
    device: torch.device
    deferred_weights: int = 0
    batch_size: int | None = None
    phase: str = "the first step"
    waiting: bool = False
    is_told_to_end: bool = False
    sync: GradientSync | StaleSync | None = None
    before_update: Callable[[StepReport], None] | None = None
    after_delayed_update: Callable[[], None] = _do_nothing
    predicted: PredictedWeights | None = None
    recorder: TraceRecorder | None = None
    _losses: list[Tensor] = field(default_factory=list)
    _while_waiting: Callable[[], None] = _do_nothing

    def __post_init__(self) -> None:
        order = actions(self.schedule, len(self.microbatch_sizes), self.in_flight, self.deferred_weights)
        self._actions = [a for a in order if a.kind != WEIGHT_GRADIENTS or self.stage.defers_weights]

    def step(
        self,
        step: int,
        next_batch: Callable[[], tuple[Any, Any]],
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> StepReport:
        """One step: every microbatch forward and backward (with its weight gradients), then the optimizer.

        Args:
            next_batch: gives the whole batch's inputs and targets; asked by the first and the last stage
                only, with their receives posted.
            stop_requested: asked by the first stage, before its last forward, until it says so: whether this
                is the last step.
            while_waiting: called once, before the first wait for a gradient, or at the end if there is none.
        """
        self.phase = f"step {step}"
        report = StepReport()
        if self.recorder is not None:
            self.recorder.begin(step)
        for receiver in self.stage_io.receivers:
            receiver.begin(step, len(self.microbatch_sizes))
        batch = self._fetch(next_batch)
        self._while_waiting = while_waiting
        if self.sync is not None:
            self.sync.start_step()
        if self.predicted is not None:
            report.optimizer_s += self.timer.run(self.predicted.enter).wall_s
        self._run_microbatches(step, batch, report, stop_requested)
        if self.predicted is not None:
            report.optimizer_s += self.timer.run(self.predicted.leave).wall_s
        if isinstance(self.sync, DelayedSync) and self.sync.delays(step):
            self._update_later(self.sync, step, report)
        else:
            while self.sync is not None and self._sum_gradients(self.sync, step, report):
                report.repeats += 1
                self._run_microbatches(step, batch, report, stop_requested)
            self._update(step, report)
        if self.is_last:
            report.loss = float(sum(loss.item() for loss in self._losses))
        self._use_waiting()
        if self.recorder is not None:
            self.recorder.end()
        return report

    def drain(self) -> None:
        """Waits until everything that was sent has left."""
        self.phase = "sending the last gradients"
        for sender in self.stage_io.senders:
            sender.drain()

    def _run_microbatches(
        self, step: int, batch: tuple[Any, Any], report: StepReport, stop_requested: Callable[[], bool]
    ) -> None:
        """Every microbatch forward and backward."""
        self._losses.clear()
        inputs, targets = self._split(batch)
        final = len(self.microbatch_sizes) - 1
        taker = self.sync if self.sync is not None and self.sync.by_microbatch else None
        last_kind = WEIGHT_GRADIENTS if self.stage.defers_weights else BACKWARD
        for kind, microbatch in self._actions:
            if kind == FORWARD:
                self.phase = f"step {step}, forward of microbatch {microbatch}"
                if inputs is not None and microbatch == final:
                    report.is_last = report.is_last or stop_requested()
                self._forward(step, microbatch, inputs, targets, report)
            elif kind == BACKWARD:
                self.phase = f"step {step}, backward of microbatch {microbatch}"
                if self.stage_io.output_gradients is not None:
                    self._use_waiting()
                if self.sync is not None and microbatch == final:
                    self.sync.begin(step, early=not self.stage.defers_weights)
                self._backward(step, microbatch, report)
            else:
                self.phase = f"step {step}, weight gradients of microbatch {microbatch}"
                self._weights(microbatch, report)
            if taker is not None and kind == last_kind and microbatch != final:
                report.backward_s += self.timer.run(taker.end_microbatch).wall_s
            for receiver in self.stage_io.receivers:
                receiver.refill()

    def _use_waiting(self) -> None:
        """Calls ``while_waiting``, once a step."""
        self._while_waiting()
        self._while_waiting = _do_nothing

    def _fetch(self, next_batch: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """The step's batch; (None, None) on stages that need none."""
        return next_batch() if self.stage_io.inputs is None or self.is_last else (None, None)

    def _split(self, batch: tuple[Any, Any]) -> tuple[list[Any] | None, list[Any] | None]:
        """By microbatch: the inputs on the first stage, the targets on the last; None elsewhere.

        Layers and losses may overwrite them. So where the step may need them again, they are copies.
        """
        inputs, targets = batch
        if self.sync is not None and self.sync.by_microbatch:
            inputs, targets = map_tensors(torch.clone, inputs), map_tensors(torch.clone, targets)
        return (
            split_inputs(inputs, self.microbatch_sizes, self.device)
            if self.stage_io.inputs is None
            else None,
            split_targets(targets, self.microbatch_sizes, self.device) if self.is_last else None,
        )

    def _forward(
        self,
        step: int,
        microbatch: int,
        inputs: list[Any] | None,
        targets: list[Any] | None,
        report: StepReport,
    ) -> None:
        if inputs is not None:
            tensors = inputs[microbatch]
            inputs[microbatch] = None
        else:
            assert self.stage_io.inputs is not None
            message = self._receive(self.stage_io.inputs, microbatch, report)
            tensors = message.tensors
            if message.flags & LAST_STEP:
                self.is_told_to_end = report.is_last = True
        if targets is not None:
            whole = self.batch_size or sum(self.microbatch_sizes)
            share = self.microbatch_sizes[microbatch] / whole
            last = self.timer.run(
                lambda: self.stage.forward_loss(microbatch, tensors, targets[microbatch], share)
            )
            seconds = last.wall_s
            self._record(FORWARD, microbatch, seconds)
            self._losses.append(last.result)
        else:
            timed = self.timer.run(lambda: self.stage.forward(microbatch, tensors))
            seconds = timed.wall_s
            self._record(FORWARD, microbatch, seconds)
            assert self.stage_io.outputs is not None
            flags = LAST_STEP if report.is_last else 0
            report.transfer_s += self.stage_io.outputs.send(step, microbatch, timed.result, flags)
            self._record_send(microbatch)
        report.forward_s += seconds

    def _backward(self, step: int, microbatch: int, report: StepReport) -> None:
        gradients: tuple[Tensor, ...] | None = None
        if self.stage_io.output_gradients is not None:
            gradients = self._receive(self.stage_io.output_gradients, microbatch, report).tensors
            if self.stage_io.outputs is not None:
                self.stage_io.outputs.confirm(microbatch)
        elif not self.is_last:
            gradients = ()  # no output of this stage is differentiable
        backward = self.stage.backward_inputs if self.stage.defers_weights else self.stage.backward
        timed = self.timer.run(lambda: backward(microbatch, gradients))
        self._record(BACKWARD, microbatch, timed.wall_s)
        report.backward_s += timed.wall_s
        if self.stage_io.input_gradients is not None:
            report.transfer_s += self.stage_io.input_gradients.send(step, microbatch, timed.result)
            self._record_send(microbatch)

    def _weights(self, microbatch: int, report: StepReport) -> None:
        seconds = self.timer.run(lambda: self.stage.backward_weights(microbatch)).wall_s
        self._record(WEIGHT_GRADIENTS, microbatch, seconds)
        report.backward_s += seconds
        report.weight_s += seconds

    def _sum_gradients(self, sync: GradientSync | StaleSync, step: int, report: StepReport) -> bool:
        """After the last backward: gradients become the sums of all pipelines', which end together.

        Returns whether all of them must make the step's microbatches again first.
        """
        if sync.updates_weights:
            self._prepare_update(step, report)
        self.phase = f"step {step}, the sum of the gradients"
        self.waiting = True
        found = sync.finish(is_last=report.is_last)
        self.waiting = False
        self._count_sum(found, report)
        report.sync_s, report.ahead = found.sync_s, found.ahead
        report.is_last = found.is_last
        return found.repeats

    def _update_later(self, sync: DelayedSync, step: int, report: StepReport) -> None:
        """With a delay: the update by the step before's gradients, and where the step settles its own.

        The step's own sum begins before either, and goes on beside the next step.
        """
        stops, report.is_last = report.is_last, False
        self.phase = f"step {step}, the sum of the step before"
        self.waiting = True
        earlier = sync.change_over(step, is_last=stops)
        self.waiting = False
        report.sync_s = 0.0
        if earlier is not None:
            self._count_sum(earlier, report)
            report.sync_s += earlier.sync_s
            report.is_last = earlier.is_last
            if self.predicted is not None:
                report.optimizer_s += self.timer.run(self.predicted.keep).wall_s
            self._update(step, report)
            self.after_delayed_update()
        report.is_applied = report.is_last or sync.settles(step)
        if report.is_applied:
            self.phase = f"step {step}, the sum of the gradients"
            self.waiting = True
            own = sync.settle()
            self.waiting = False
            self._count_sum(own, report)
            report.sync_s += own.sync_s
            report.is_last = report.is_last or own.is_last
            self._update(step, report)
            if self.predicted is not None:
                self.predicted.forget()

    def _count_sum(self, found: SyncReport, report: StepReport) -> None:
        """Adds what was waited for a sum to the step's figures."""
        report.idle_s += found.idle_s
        report.transfer_s += found.transfer_s
        if self.recorder is not None:
            self.recorder.record_wait(0, found.idle_s, found.transfer_s, SUM)

    def _update(self, step: int, report: StepReport) -> None:
        """Before the next step: the gradients' norm, and the optimizer."""
        if self.sync is None or not self.sync.updates_weights:
            self._prepare_update(step, report)
        self.phase = f"step {step}, optimizer"
        if self.optimizer is not None:
            seconds = self.timer.run(self._step_optimizer).wall_s
            self._record(OPTIMIZER, 0, seconds)
            report.optimizer_s += seconds

    def _prepare_update(self, step: int, report: StepReport) -> None:
        if self.before_update is not None:
            self.phase = f"step {step}, the gradients' norm"
            self.before_update(report)

    def _step_optimizer(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _receive(self, receiver: MessageReceiver, microbatch: int, report: StepReport) -> ReceivedMessage:
        self.waiting = True
        message = receiver.receive(microbatch)
        self.waiting = False
        report.idle_s += message.idle_s
        report.transfer_s += message.transfer_s
        if message.idle_s > 0.0:
            is_input = receiver is self.stage_io.inputs
            (report.input_messages_s if is_input else report.gradient_messages_s).append(message.transfer_s)
        if self.recorder is not None:
            self.recorder.record_wait(microbatch, message.idle_s, message.transfer_s)
        return message

    def _record(self, kind: str, microbatch: int, seconds: float) -> None:
        if self.recorder is not None:
            self.recorder.record_action(kind, microbatch, seconds)

    def _record_send(self, microbatch: int) -> None:
        if self.recorder is not None:
            self.recorder.record_send(microbatch)
