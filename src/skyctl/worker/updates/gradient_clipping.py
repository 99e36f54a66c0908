"""Gradient clipping by the global norm over all stages, with messages between neighbours only.

Each stage adds the squared norm of its own gradients to the sum that its successor sends, and sends that on
to its predecessor; the total, known to the first stage, travels back the same way. Stages end their backwards
in that order anyway, so the sums hardly make anyone wait; on the way back the total arrives at a stage just
ahead of the next step's first activations. The cost: optimizers no longer run while earlier stages are busy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from skyctl.device.device_timer import DeviceTimer
from skyctl.errors import RunError
from skyctl.transport.work import Work
from skyctl.worker.peer import Neighbours, Peer
from skyctl.worker.progress import Progress
from skyctl.worker.trace.trace_recorder import CLIP, TraceRecorder
from skyctl.worker.updates.step_report import StepReport
from skyctl.workload.mixed_precision import accumulate_into_master, master_of

T = TypeVar("T")

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class GradientClipper:
    """One stage's part: ``begin`` before each step, ``clip`` before each update after its backwards.

    Args:
        parameters: the stage's; those without a gradient count nothing.
        counted_elsewhere: those of them whose copies an earlier stage counts; they are scaled only.
        max_norm: as in ``torch.nn.utils.clip_grad_norm_`` (2-norm).
        share: of the batch that the gradients are of; they are clipped to that share of the norm.
        tag: a tag that no other message between two stages has; the one after it is taken too.
        layers: what to call the stage's layers in an error.
        recorder: told of the clipping and of the waiting for it, where a trace is wanted.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        max_norm: float,
        *,
        share: float,
        neighbours: Neighbours,
        tag: int,
        timer: DeviceTimer,
        progress: Progress,
        layers: str,
        recorder: TraceRecorder | None = None,
        counted_elsewhere: Sequence[nn.Parameter] = (),
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        elsewhere = {id(p) for p in counted_elsewhere}
        self._counted = [p for p in self._parameters if id(p) not in elsewhere]
        self._max_norm, self._share = share * max_norm, share
        self._previous, self._following = neighbours
        self._tag, self._timer, self._progress, self._layers = tag, timer, progress, layers
        self._recorder = recorder
        self._step = 0
        self._pending: list[tuple[torch.Tensor, Work]] = []
        self._from_next: tuple[torch.Tensor, Work] | None = None
        self._from_previous: tuple[torch.Tensor, Work] | None = None

    def begin(self, step: int) -> None:
        """Posts the receives of the next ``clip``, unless they are from a step that did not clip."""
        self._step = step
        if self._following is not None and self._from_next is None:
            self._from_next = self._post(self._following, self._tag)
        if self._previous is not None and self._from_previous is None:
            self._from_previous = self._post(self._previous, self._tag + 1)

    def clip(self, report: StepReport) -> float:
        """Scales the gradients; returns the norm that all stages' gradients had together, over ``share``.

        Raises:
            RunError: the norm is not finite; raised by the last stage whose own gradients are not.
        """
        self.begin(self._step)
        squared = self._run(self._squared_norm, report)
        if not math.isfinite(squared):
            raise RunError(
                f"the gradients of {self._layers} are not finite (their norm is {math.sqrt(abs(squared))}): "
                "training has diverged",
                hint="try a lower --learning-rate, or more --warmup-steps",
            )
        if self._following is not None:
            squared += self._receive(self._from_next, self._following, report)
            self._from_next = None
        if self._previous is not None:
            self._send(self._previous, self._tag, squared)
            squared = self._receive(self._from_previous, self._previous, report)
            self._from_previous = None
        if self._following is not None:
            self._send(self._following, self._tag + 1, squared)
        norm = math.sqrt(squared)
        if norm + _EPSILON > self._max_norm:
            scale = self._max_norm / (norm + _EPSILON)
            self._run(lambda: self._scale(scale), report)
        return norm / self._share

    def drain(self) -> None:
        """Waits until everything that was sent has left."""
        for _, work in self._pending:
            work.wait()
        self._pending.clear()

    def _run(self, action: Callable[[], T], report: StepReport) -> T:
        timed = self._timer.run(action)
        report.optimizer_s += timed.wall_s
        if self._recorder is not None:
            self._recorder.record_action(CLIP, 0, timed.wall_s)
        return timed.result

    @staticmethod
    def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        found = []
        for parameter in parameters:
            accumulate_into_master(parameter)
            gradient = master_of(parameter).grad
            if gradient is not None:
                if gradient.is_sparse:
                    gradient = gradient.coalesce()
                    master_of(parameter).grad = gradient
                    gradient = gradient.values()
                found.append(gradient.detach())
        return found

    def _squared_norm(self) -> float:
        norms = [torch.linalg.vector_norm(g, dtype=_sum_dtype(g)) for g in self._gradients(self._counted)]
        if not norms:
            return 0.0
        return float(torch.stack([norm.double() for norm in norms]).square().sum().item())

    def _scale(self, scale: float) -> None:
        gradients = self._gradients(self._parameters)
        if gradients:
            torch._foreach_mul_(gradients, scale)

    def _post(self, neighbour: Peer, tag: int) -> tuple[torch.Tensor, Work]:
        buffer = torch.empty(2, dtype=torch.float64)
        return buffer, neighbour.recv(buffer, tag)

    def _send(self, neighbour: Peer, tag: int, squared: float) -> None:
        if len(self._pending) > 2:
            self.drain()  # sent in the step before, and answered long since
        message = torch.tensor([self._step, squared], dtype=torch.float64)
        self._pending.append((message, neighbour.send(message, tag)))

    def _receive(
        self, posted: tuple[torch.Tensor, Work] | None, neighbour: Peer, report: StepReport
    ) -> float:
        assert posted is not None, "begin() first"
        buffer, work = posted
        start = time.perf_counter()
        with self._progress.waits():
            work.wait()
        waited_s = time.perf_counter() - start
        travelling_s = min(waited_s, neighbour.latency_s)
        report.transfer_s += travelling_s
        report.idle_s += waited_s - travelling_s
        if self._recorder is not None:
            self._recorder.record_wait(0, waited_s - travelling_s, travelling_s)
        step, squared = buffer.tolist()
        if int(step) != self._step:
            peer = neighbour.name
            raise RunError(f"{peer} sent the gradients' norm of step {int(step)}, not of {self._step}")
        return float(squared)


def _sum_dtype(gradient: torch.Tensor) -> torch.dtype:
    """The dtype to sum squares in: float32 for half precision, else the gradient's own."""
    return torch.promote_types(gradient.dtype, torch.float32)
