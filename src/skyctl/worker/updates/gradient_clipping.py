"""Gradient clipping by the global norm over all stages of a pipeline.

The stages sum their squared norms (``stage_group``). The cost: optimizers no longer run while earlier stages
are busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from skyctl.device.device_timer import DeviceTimer
from skyctl.errors import RunError
from skyctl.worker.stage_group import StageGroup
from skyctl.worker.trace.trace_recorder import CLIP, TraceRecorder
from skyctl.worker.updates.step_report import StepReport
from skyctl.workload.mixed_precision import accumulate_into_master, master_of

T = TypeVar("T")

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class GradientClipper:
    """One stage's part: ``clip`` before each update, after its backwards.

    Args:
        parameters: the stage's; those without a gradient count nothing.
        counted_elsewhere: those of them whose copies an earlier stage counts; they are scaled only.
        max_norm: as in ``torch.nn.utils.clip_grad_norm_`` (2-norm).
        share: of the batch that the gradients are of; they are clipped to that share of the norm.
        layers: what to call the stage's layers in an error.
        recorder: told of the clipping and of the waiting for it, where a trace is wanted.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        max_norm: float,
        *,
        share: float,
        stages: StageGroup,
        timer: DeviceTimer,
        layers: str,
        recorder: TraceRecorder | None,
        counted_elsewhere: Sequence[nn.Parameter],
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        elsewhere = {id(p) for p in counted_elsewhere}
        self._counted = [p for p in self._parameters if id(p) not in elsewhere]
        self._max_norm, self._share = share * max_norm, share
        self._stages, self._timer, self._layers, self._recorder = stages, timer, layers, recorder

    def clip(self, report: StepReport) -> float:
        """Scales the gradients; returns the norm that all stages' gradients had together, over ``share``.

        Raises:
            RunError: the norm is not finite; raised by the last stage whose own gradients are not.
            PeerLostError, PeerProtocolError: as ``StageGroup.all_reduce``.
        """
        own = self._run(self._squared_norm, report)
        if not math.isfinite(own):
            raise RunError(
                f"the gradients of {self._layers} are not finite (their norm is {math.sqrt(abs(own))}): "
                "training has diverged",
                hint="try a lower --learning-rate, or more --warmup-steps",
            )
        total = torch.tensor([own], dtype=torch.float64)
        waited = self._stages.all_reduce(total)
        report.idle_s += waited.idle_s
        report.transfer_s += waited.transfer_s
        if self._recorder is not None:
            self._recorder.record_wait(0, waited.idle_s, waited.transfer_s)
        squared = total.item()
        if not own <= squared < math.inf:
            raise RunError(
                f"all stages' gradients have the squared norm {squared:g}, and this stage's have {own:g}"
            )
        norm = math.sqrt(squared)
        if norm + _EPSILON > self._max_norm:
            scale = self._max_norm / (norm + _EPSILON)
            self._run(lambda: self._scale(scale), report)
        return norm / self._share

    def _run(self, action: Callable[[], T], report: StepReport) -> T:
        timed = self._timer.run(action)
        report.optimizer_s += timed.wall_s
        if self._recorder is not None:
            self._recorder.record_action(CLIP, 0, timed.wall_s)
        return timed.result

    @staticmethod
    def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        gradients = []
        for parameter in parameters:
            accumulate_into_master(parameter)
            gradient = master_of(parameter).grad
            if gradient is not None:
                if gradient.is_sparse:
                    gradient = gradient.coalesce()
                    master_of(parameter).grad = gradient
                    gradient = gradient.values()
                gradients.append(gradient.detach())
        return gradients

    def _squared_norm(self) -> float:
        norms = [torch.linalg.vector_norm(g, dtype=_sum_dtype(g)) for g in self._gradients(self._counted)]
        if not norms:
            return 0.0
        return float(torch.stack([norm.double() for norm in norms]).square().sum().item())

    def _scale(self, scale: float) -> None:
        gradients = self._gradients(self._parameters)
        if gradients:
            torch._foreach_mul_(gradients, scale)


def _sum_dtype(gradient: torch.Tensor) -> torch.dtype:
    """The dtype to sum squares in: float32 for half precision, else the gradient's own."""
    return torch.promote_types(gradient.dtype, torch.float32)
