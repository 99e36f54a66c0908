"""Clipping by the global norm of a step's gradients, over pairs only.

Each stage adds the squared norm of its own gradients to what its successor sends and hands the sum on; the
first stage knows the whole, and it goes back the same way. Stages end their backwards in that order anyway,
so the sums hardly make anyone wait; on the way back the total of a stage comes just ahead of the next step's
first activations. What it costs is that optimizers no longer run while earlier stages are still busy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from skyctl.device.pace import Pace
from skyctl.errors import RunError
from skyctl.transport.pair import FIRST_TAG, Pair, Work
from skyctl.worker.executor import Executor, StepReport
from skyctl.worker.recorder import CLIP, Recorder
from skyctl.workload.mixed import collect, master_of
from skyctl.workload.recipe import Recipe

T = TypeVar("T")

_SLACK = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass
class Neighbour:
    """A pair, and the seconds a message takes over it."""

    pair: Pair
    latency_s: float


class Clip:
    """One stage's part. ``begin`` before each step, then call it once between backwards and optimizer.

    Args:
        parameters: the stage's; those without a gradient count nothing.
        max_norm: as in ``torch.nn.utils.clip_grad_norm_`` (2-norm).
        tag: a tag of the pairs that no other message has; the one after it is taken too.
        recorder: told of the clipping and of the waiting for it, where a trace is wanted.
        layers: what to call the stage's layers in an error.
        on_wait: told True when it begins to wait for a neighbour, False afterwards.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        max_norm: float,
        *,
        previous: Neighbour | None,
        following: Neighbour | None,
        tag: int,
        pace: Pace,
        layers: str,
        recorder: Recorder | None = None,
        on_wait: Callable[[bool], None] = lambda _waits: None,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._max_norm = max_norm
        self._previous, self._following = previous, following
        self._tag, self._pace, self._layers, self._on_wait = tag, pace, layers, on_wait
        self._recorder = recorder
        self._step = 0
        self._sent: list[tuple[torch.Tensor, Work]] = []
        self._from_next: tuple[torch.Tensor, Work] | None = None
        self._from_previous: tuple[torch.Tensor, Work] | None = None

    def begin(self, step: int) -> None:
        """Posts the step's receives."""
        self._step = step
        if self._following is not None:
            self._from_next = self._post(self._following, self._tag)
        if self._previous is not None:
            self._from_previous = self._post(self._previous, self._tag + 1)

    def __call__(self, report: StepReport) -> float:
        """Scales the gradients; gives the norm they had all together, over every stage.

        Raises:
            RunError: the norm is not finite; raised by the last stage whose own gradients are not.
        """
        squared = self._run(self._squared, report)
        if not math.isfinite(squared):
            raise RunError(
                f"the gradients of {self._layers} are not finite (their norm is {math.sqrt(abs(squared))}): "
                "training has diverged",
                hint="try a lower --learning-rate, or more --warmup-steps",
            )
        if self._following is not None:
            squared += self._take(self._from_next, self._following, report)
        if self._previous is not None:
            self._send(self._previous, self._tag, squared)
            squared = self._take(self._from_previous, self._previous, report)
        if self._following is not None:
            self._send(self._following, self._tag + 1, squared)
        norm = math.sqrt(squared)
        if norm + _SLACK > self._max_norm:
            scale = self._max_norm / (norm + _SLACK)
            self._run(lambda: self._scale(scale), report)
        return norm

    def drain(self) -> None:
        """Waits until all that was sent has gone."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()

    def _run(self, action: Callable[[], T], report: StepReport) -> T:
        result, seconds, _ = self._pace.run(action)
        report.optimizer_s += seconds
        if self._recorder is not None:
            self._recorder.ran(CLIP, 0, seconds)
        return result

    def _gradients(self) -> list[torch.Tensor]:
        found = []
        for parameter in self._parameters:
            collect(parameter)
            gradient = master_of(parameter).grad
            if gradient is not None:
                if gradient.is_sparse:
                    gradient = gradient.coalesce()
                    master_of(parameter).grad = gradient
                    gradient = gradient.values()
                found.append(gradient.detach())
        return found

    def _squared(self) -> float:
        norms = [torch.linalg.vector_norm(g, dtype=_exact(g)) for g in self._gradients()]
        if not norms:
            return 0.0
        return float(torch.stack([norm.double() for norm in norms]).square().sum().item())

    def _scale(self, scale: float) -> None:
        gradients = self._gradients()
        if gradients:
            torch._foreach_mul_(gradients, scale)

    def _post(self, neighbour: Neighbour, tag: int) -> tuple[torch.Tensor, Work]:
        buffer = torch.empty(2, dtype=torch.float64)
        return buffer, neighbour.pair.recv(buffer, tag)

    def _send(self, neighbour: Neighbour, tag: int, squared: float) -> None:
        if len(self._sent) > 2:
            self.drain()  # those of the step before, which have been answered long since
        message = torch.tensor([self._step, squared], dtype=torch.float64)
        self._sent.append((message, neighbour.pair.send(message, tag)))

    def _take(
        self, posted: tuple[torch.Tensor, Work] | None, neighbour: Neighbour, report: StepReport
    ) -> float:
        assert posted is not None, "begin() first"
        buffer, work = posted
        start = time.perf_counter()
        self._on_wait(True)
        work.wait()
        self._on_wait(False)
        waited_s = time.perf_counter() - start
        travelling_s = min(waited_s, neighbour.latency_s)
        report.transfer_s += travelling_s
        report.idle_s += waited_s - travelling_s
        if self._recorder is not None:
            self._recorder.waited(0, waited_s - travelling_s, travelling_s)
        step, squared = buffer.tolist()
        if int(step) != self._step:
            raise RunError(
                f"{neighbour.pair.peer} sent the gradients' norm of step {int(step)}, not of {self._step}"
            )
        return float(squared)


def clipping(recipe: Recipe, executor: Executor, sides: Mapping[str, Neighbour], layers: str) -> Clip | None:
    """The stage's part, called between backwards and optimizer; None where nothing is clipped.

    ``sides``: the neighbours there are, ``previous`` and ``next``.
    """
    if recipe.clip_norm is None:
        return None
    clip = Clip(
        executor.stage.parameters,
        recipe.clip_norm,
        previous=sides.get("previous"),
        following=sides.get("next"),
        tag=FIRST_TAG + 2 * len(executor.sizes),  # the first after those of a step's messages
        pace=executor.pace,
        layers=layers,
        recorder=executor.recorder,
        on_wait=lambda waits: setattr(executor, "waiting", waits),
    )

    def before_update(report: StepReport) -> None:
        report.grad_norm = clip(report)

    executor.before_update = before_update
    return clip


def _exact(gradient: torch.Tensor) -> torch.dtype:
    """Half precision is summed in float32."""
    return torch.promote_types(gradient.dtype, torch.float32)
