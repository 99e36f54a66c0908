"""Plays a schedule on real tensors: the same actions, in the same order, that the simulator plays on numbers.

What makes the contract's model of time true: receives are posted ahead, sends return at once, and between two
actions there is nothing but waiting for the next one's input. Backwards run in the order 0…M−1 under every
schedule, and so do weight gradients, so that they are summed in one order whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from skyctl.device.pace import Pace
from skyctl.schedule.actions import BACKWARD, FORWARD, OPTIMIZER, WEIGHTS, actions
from skyctl.worker.feed import as_tuple, split
from skyctl.worker.messages import LAST_STEP, Inbox, Outbox, Taken
from skyctl.worker.recorder import Recorder
from skyctl.worker.stage import Stage

Tensor = torch.Tensor


@dataclass
class StepReport:
    """One step of one stage.

    ``forward_s``, ``backward_s`` and ``optimizer_s`` are the layers' own time (the loss's with the forward);
    ``idle_s`` and ``transfer_s`` the waiting (see ``messages``). ``loss``: of the last stage, the mean over
    the batch. ``last``: the pipeline ends with this step. ``weight_s``: the part of ``backward_s`` that was
    put off (W of ``zero-bubble``). ``grad_norm``: where gradients are clipped. ``inputs_s`` and
    ``gradients_s``: of the messages that were waited for from before their start, the seconds on the way.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    optimizer_s: float = 0.0
    idle_s: float = 0.0
    transfer_s: float = 0.0
    loss: float | None = None
    grad_norm: float | None = None
    last: bool = False
    inputs_s: list[float] = field(default_factory=list)
    gradients_s: list[float] = field(default_factory=list)


@dataclass
class Ports:
    """A stage's four message streams; None at the pipeline's ends, and where nothing is differentiable."""

    inputs: Inbox | None = None
    outputs: Outbox | None = None
    output_gradients: Inbox | None = None
    input_gradients: Outbox | None = None

    @property
    def inboxes(self) -> list[Inbox]:
        """Those there are."""
        return [box for box in (self.inputs, self.output_gradients) if box is not None]

    @property
    def outboxes(self) -> list[Outbox]:
        """Those there are."""
        return [box for box in (self.outputs, self.input_gradients) if box is not None]


@dataclass
class Executor:
    """One stage's player.

    Args:
        sizes: samples of each microbatch.
        in_flight: how many microbatches the stage keeps between forward and backward.
        weights_behind: under ``zero-bubble``, how many its weight gradients follow behind.
        optimizer: None for a stage without parameters.
        phase: what it is doing, for an error's message.
        waiting: whether it waits for a message just now.
        before_update: called between the last backward and the optimizer's step.
        recorder: told what was done when, where a trace is wanted.
    """

    stage: Stage
    ports: Ports
    pace: Pace
    sizes: Sequence[int]
    schedule: str
    in_flight: int
    optimizer: torch.optim.Optimizer | None
    is_last: bool
    device: torch.device
    weights_behind: int = 0
    phase: str = "the first step"
    waiting: bool = False
    before_update: Callable[[StepReport], None] | None = None
    recorder: Recorder | None = None
    _losses: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        order = actions(self.schedule, len(self.sizes), self.in_flight, self.weights_behind)
        self._actions = [a for a in order if a.kind != WEIGHTS or self.stage.defers_weights]

    def step(
        self,
        step: int,
        batch: Callable[[], tuple[Any, Any]],
        *,
        ending: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepReport:
        """One step: every microbatch forward and backward (with its weight gradients), then the optimizer.

        Args:
            batch: gives the whole batch's inputs and targets; asked by the first and the last stage only,
                with their receives posted.
            ending: asked once, by the first stage, before its last forward: whether this is the last step.
            meanwhile: called once, before the first wait for a gradient, or at the end where there is none.
        """
        self.phase = f"step {step}"
        report = StepReport()
        if self.recorder is not None:
            self.recorder.begin(step)
        for inbox in self.ports.inboxes:
            inbox.begin(step)
        self._losses.clear()
        is_first = self.ports.inputs is None
        inputs, targets = batch() if is_first or self.is_last else (None, None)
        fed = split(inputs, self.sizes, self.device) if is_first else None
        aims = split(targets, self.sizes, self.device) if self.is_last else None
        pending: Callable[[], None] | None = meanwhile
        final = len(self.sizes) - 1
        for kind, microbatch in self._actions:
            if kind == FORWARD:
                self.phase = f"step {step}, forward of microbatch {microbatch}"
                if fed is not None and microbatch == final:
                    report.last = ending()
                self._forward(step, microbatch, fed, aims, report)
            elif kind == BACKWARD:
                self.phase = f"step {step}, backward of microbatch {microbatch}"
                if pending is not None and self.ports.output_gradients is not None:
                    pending()
                    pending = None
                self._backward(step, microbatch, report)
            else:
                self.phase = f"step {step}, weight gradients of microbatch {microbatch}"
                self._weights(microbatch, report)
            for inbox in self.ports.inboxes:
                inbox.refill()
        if self.before_update is not None:
            self.phase = f"step {step}, the gradients' norm"
            self.before_update(report)
        self.phase = f"step {step}, optimizer"
        if self.optimizer is not None:
            seconds = self.pace.run(self._update).wall_s
            self._ran(OPTIMIZER, 0, seconds)
            report.optimizer_s += seconds
        if self.is_last:
            report.loss = self._loss()
        if pending is not None:
            pending()
        if self.recorder is not None:
            self.recorder.end()
        return report

    def drain(self) -> None:
        """Waits until all that was sent has gone."""
        self.phase = "sending the last gradients"
        for outbox in self.ports.outboxes:
            outbox.drain()

    def _forward(
        self,
        step: int,
        microbatch: int,
        fed: list[Any] | None,
        aims: list[Any] | None,
        report: StepReport,
    ) -> None:
        if fed is not None:
            inputs = as_tuple(fed[microbatch])
            fed[microbatch] = None
        else:
            assert self.ports.inputs is not None
            message = self._take(self.ports.inputs, microbatch, report)
            inputs = message.tensors
            report.last = report.last or bool(message.flags & LAST_STEP)
        if aims is not None:
            share = self.sizes[microbatch] / sum(self.sizes)
            loss, seconds, _ = self.pace.run(
                lambda: self.stage.forward_loss(microbatch, inputs, aims[microbatch], share)
            )
            self._ran(FORWARD, microbatch, seconds)
            self._losses.append(loss)
        else:
            outputs, seconds, _ = self.pace.run(lambda: self.stage.forward(microbatch, inputs))
            self._ran(FORWARD, microbatch, seconds)
            assert self.ports.outputs is not None
            flags = LAST_STEP if report.last else 0
            report.transfer_s += self.ports.outputs.send(step, microbatch, outputs, flags)
            self._sent(microbatch)
        report.forward_s += seconds

    def _backward(self, step: int, microbatch: int, report: StepReport) -> None:
        gradients: tuple[Tensor, ...] | None = None
        if self.ports.output_gradients is not None:
            gradients = self._take(self.ports.output_gradients, microbatch, report).tensors
            if self.ports.outputs is not None:
                self.ports.outputs.confirm(microbatch)
        elif not self.is_last:
            gradients = ()  # nothing this stage gives is differentiable
        run = self.stage.backward_inputs if self.stage.defers_weights else self.stage.backward
        back, seconds, _ = self.pace.run(lambda: run(microbatch, gradients))
        self._ran(BACKWARD, microbatch, seconds)
        report.backward_s += seconds
        if self.ports.input_gradients is not None:
            report.transfer_s += self.ports.input_gradients.send(step, microbatch, back)
            self._sent(microbatch)

    def _weights(self, microbatch: int, report: StepReport) -> None:
        seconds = self.pace.run(lambda: self.stage.backward_weights(microbatch)).wall_s
        self._ran(WEIGHTS, microbatch, seconds)
        report.backward_s += seconds
        report.weight_s += seconds

    def _take(self, inbox: Inbox, microbatch: int, report: StepReport) -> Taken:
        self.waiting = True
        taken = inbox.take(microbatch)
        self.waiting = False
        report.idle_s += taken.idle_s
        report.transfer_s += taken.transfer_s
        if taken.idle_s > 0.0:
            seen = report.inputs_s if inbox is self.ports.inputs else report.gradients_s
            seen.append(taken.transfer_s)
        if self.recorder is not None:
            self.recorder.waited(microbatch, taken.idle_s, taken.transfer_s)
        return taken

    def _ran(self, kind: str, microbatch: int, seconds: float) -> None:
        if self.recorder is not None:
            self.recorder.ran(kind, microbatch, seconds)

    def _sent(self, microbatch: int) -> None:
        if self.recorder is not None:
            self.recorder.sent(microbatch)

    def _update(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self) -> float:
        return float(sum(loss.item() for loss in self._losses))
