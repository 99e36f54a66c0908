"""A stage's optimizer step, and what comes before it: terms that are added to gradients, and clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from skyctl.device.device_timer import DeviceTimer
from skyctl.schedule.actions import OPTIMIZER
from skyctl.worker.progress import Progress
from skyctl.worker.trace.trace_recorder import TraceRecorder
from skyctl.worker.updates.gradient_clipping import GradientClipper
from skyctl.worker.updates.step_report import StepReport


@dataclass
class StageUpdate:
    """Makes the updates of one stage's weights.

    Args:
        optimizer: None for a stage without parameters.
        clipper: scales gradients by their norm over all stages; None: nothing is clipped.
        recorder: told of the optimizer's step, where a trace is wanted.

    Attributes:
        terms: called before gradients are clipped, to add to them.
    """

    optimizer: torch.optim.Optimizer | None
    timer: DeviceTimer
    progress: Progress
    clipper: GradientClipper | None = None
    recorder: TraceRecorder | None = None
    terms: list[Callable[[], None]] = field(default_factory=list)

    def prepare(self, step: int, report: StepReport) -> None:
        """Gradients are all there: adds the terms, and clips."""
        for term in self.terms:
            report.optimizer_s += self.timer.run(term).wall_s
        if self.clipper is not None:
            self.progress.phase = f"step {step}, the gradients' norm"
            report.grad_norm = self.clipper.clip(report)

    def apply(self, step: int, report: StepReport) -> None:
        """The optimizer's step; parameters have no gradients after it."""
        self.progress.phase = f"step {step}, optimizer"
        if self.optimizer is None:
            return
        seconds = self.timer.run(self._step_optimizer).wall_s
        if self.recorder is not None:
            self.recorder.record_action(OPTIMIZER, 0, seconds)
        report.optimizer_s += seconds

    def make(self, step: int, report: StepReport) -> None:
        """``prepare``, then ``apply``."""
        self.prepare(step, report)
        self.apply(step, report)

    def _step_optimizer(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
