"""Executes a schedule on real tensors: the actions, in their order, that the simulator plays on numbers.

Three things make the contract's model of time true: receives are posted ahead, sends return at once, and
between two actions there is nothing but waiting for the next one's input. Backwards run in the order 0…M−1
under every schedule, and so do weight gradients, so that they are summed in one order whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from skyctl.device.device_timer import DeviceTimer
from skyctl.schedule.actions import BACKWARD, FORWARD, WEIGHT_GRADIENTS, actions
from skyctl.worker.batches.sample_batches import split_inputs, split_targets
from skyctl.worker.pipeline.messages import LAST_STEP, MessageReceiver, ReceivedMessage
from skyctl.worker.pipeline.stage import PipelineStage
from skyctl.worker.pipeline.stage_io import StageIO
from skyctl.worker.progress import Progress
from skyctl.worker.trace.trace_recorder import TraceRecorder
from skyctl.worker.updates.step_report import StepReport
from skyctl.worker.updates.update_rules import EachStep
from skyctl.workload.structures import map_tensors

Tensor = torch.Tensor


def _do_nothing() -> None:
    """Does nothing, for calls where there is nothing to do."""


@dataclass
class Executor:
    """Runs the actions of one stage, step by step.

    Args:
        microbatch_sizes: samples of each microbatch of this pipeline.
        batch_size: samples of the step's whole batch; None: those microbatches are all there are.
        in_flight: how many microbatches the stage keeps between forward and backward.
        deferred_weights: under ``zero-bubble``, how many microbatches the weight gradients lag behind.
        rule: updates the weights after a step's last backward.
        progress: told what it is doing, and when it waits.
        is_told_to_end: the stage before has said that the run ends.
        recorder: told what was done when, where a trace is wanted.
        before_repeat: called before the step's microbatches are made again.
    """

    stage: PipelineStage
    stage_io: StageIO
    timer: DeviceTimer
    microbatch_sizes: Sequence[int]
    schedule: str
    in_flight: int
    rule: EachStep
    progress: Progress
    is_last: bool
    device: torch.device
    deferred_weights: int = 0
    batch_size: int | None = None
    is_told_to_end: bool = False
    recorder: TraceRecorder | None = None
    before_repeat: Callable[[], None] = _do_nothing
    _losses: list[Tensor] = field(default_factory=list)
    _while_waiting: Callable[[], None] = _do_nothing

    def __post_init__(self) -> None:
        self.take_share(self.microbatch_sizes)

    def take_share(self, microbatch_sizes: Sequence[int]) -> None:
        """From now on steps are of other microbatches, of so many samples each; none where it is empty.

        All stages of a pipeline take the same.
        """
        self.microbatch_sizes = microbatch_sizes
        if not microbatch_sizes:
            self._actions = []
            return
        count = len(microbatch_sizes)  # a share may have become smaller than what was to be in flight
        in_flight, deferred = min(self.in_flight, count), min(self.deferred_weights, count - 1)
        order = actions(self.schedule, count, in_flight, deferred)
        self._actions = [a for a in order if a.kind != WEIGHT_GRADIENTS or self.stage.defers_weights]

    def step(
        self,
        step: int,
        next_batch: Callable[[], tuple[Any, Any]],
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        while_waiting: Callable[[], None] = lambda: None,
        report: StepReport | None = None,
    ) -> StepReport:
        """One step: every microbatch forward and backward (with its weight gradients), then the update.

        Args:
            next_batch: gives the whole batch's inputs and targets; asked by the first and the last stage
                only, with their receives posted.
            stop_requested: asked by the first stage, before its last forward, until it says so: whether this
                is the last step.
            while_waiting: called once, before the first wait for a gradient, or at the end if there is none.
            report: of the round's steps so far, to which this step's seconds are added; None: a new one.
        """
        self.progress.phase = f"step {step}"
        report = report or StepReport()
        if self.recorder is not None:
            self.recorder.begin(step)
        for receiver in self.stage_io.receivers:
            receiver.begin(step, len(self.microbatch_sizes))
        batch = self._fetch(next_batch)
        self._while_waiting = while_waiting
        self.rule.start_step(step, report)
        self._run_microbatches(step, batch, report, stop_requested)
        while self.rule.finish(step, report):
            report.repeats += 1
            self.before_repeat()
            self._run_microbatches(step, batch, report, stop_requested)
        if self.is_last:
            report.loss = self.loss
        self._use_waiting()
        if self.recorder is not None:
            self.recorder.end()
        return report

    @property
    def loss(self) -> float:
        """On the last stage, this pipeline's part of the step's mean loss, as far as it has come."""
        return float(sum(loss.item() for loss in self._losses))

    def drop_losses(self) -> None:
        """The step's microbatches are made again: what there is of its loss does not count."""
        self._losses.clear()

    def add_microbatches(self, step: int, batch: tuple[Any, Any], report: StepReport) -> None:
        """More microbatches of the step under way: the current share's, whose gradients and losses are added.

        Args:
            batch: inputs and targets of their samples.
        """
        for receiver in self.stage_io.receivers:
            receiver.begin(step, len(self.microbatch_sizes))
        self._run_microbatches(step, batch, report, lambda: False, is_more=True)

    def average_figures(self, step: int) -> None:
        """Gives all replicas of these layers the mean of their norms' running figures."""
        self.rule.average_figures(step)

    def reset_residuals(self) -> None:
        """Drops what a checkpoint does not hold, as a run that resumes here has none of it."""
        self.rule.reset_residuals()

    def drain(self) -> None:
        """Waits until everything that was sent has left."""
        self.progress.phase = "sending the last gradients"
        for sender in self.stage_io.senders:
            sender.drain()

    def _run_microbatches(
        self,
        step: int,
        batch: tuple[Any, Any],
        report: StepReport,
        stop_requested: Callable[[], bool],
        *,
        is_more: bool = False,
    ) -> None:
        """Every microbatch forward and backward.

        Args:
            is_more: others of the same step were made before; the sum does not begin beside the last one.
        """
        if not is_more:
            self._losses.clear()
        if not self.microbatch_sizes:
            return
        inputs, targets = self._split(batch)
        final = len(self.microbatch_sizes) - 1
        last_kind = WEIGHT_GRADIENTS if self.stage.defers_weights else BACKWARD
        for kind, microbatch in self._actions:
            if kind == FORWARD:
                self.progress.phase = f"step {step}, forward of microbatch {microbatch}"
                if inputs is not None and microbatch == final:
                    report.is_last = report.is_last or stop_requested()
                self._forward(step, microbatch, inputs, targets, report)
            elif kind == BACKWARD:
                self.progress.phase = f"step {step}, backward of microbatch {microbatch}"
                if self.stage_io.output_gradients is not None:
                    self._use_waiting()
                if microbatch == final and not is_more:
                    self.rule.begin(step, early=not self.stage.defers_weights)
                self._backward(step, microbatch, report)
            else:
                self.progress.phase = f"step {step}, weight gradients of microbatch {microbatch}"
                self._weights(microbatch, report)
            if self.rule.by_microbatch and kind == last_kind and (microbatch != final or is_more):
                report.backward_s += self.timer.run(self.rule.end_microbatch).wall_s
            for receiver in self.stage_io.receivers:
                receiver.refill()

    def _use_waiting(self) -> None:
        """Calls ``while_waiting``, once a step."""
        self._while_waiting()
        self._while_waiting = _do_nothing

    def _fetch(self, next_batch: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """The step's batch; (None, None) where none is needed."""
        if not self.microbatch_sizes:
            return None, None
        return next_batch() if self.stage_io.inputs is None or self.is_last else (None, None)

    def _split(self, batch: tuple[Any, Any]) -> tuple[list[Any] | None, list[Any] | None]:
        """By microbatch: the inputs on the first stage, the targets on the last; None elsewhere.

        Layers and losses may overwrite them. So where the step may need them again, they are copies.
        """
        inputs, targets = batch
        if self.rule.by_microbatch:
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

    def _receive(self, receiver: MessageReceiver, microbatch: int, report: StepReport) -> ReceivedMessage:
        with self.progress.waits():
            message = receiver.receive(microbatch)
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
