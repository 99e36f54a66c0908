"""One repetition of what a worker does with layers: forward and backward, or the optimizer's step.

What a layer takes depends on its company: its input has just been written by the layer before, and its call
is one of many. So consecutive layers are run as a stage runs them, with marks between them. Several
microbatches are in flight: a forward writes to memory that has not just been used, a backward reads what was
written a while ago, and its gradient has just come.

Inputs are detached tensors that require a gradient where the worker's would; the last layer's part includes
the loss.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.probe.node.cache import Elsewhere
from skyctl.worker.stage import as_value
from skyctl.workload.workload import Workload

LayerValue = Tensor | tuple[Tensor, ...]


class ChainSteps:
    """Consecutive layers at one microbatch size, forward and then backward, as the worker's executor does it.

    Args:
        start: index of the first of the modules in the workload.
        in_flight: microbatches, the one whose backward comes next included.
        clock: reads the seconds that the marks between layers are made of.
    """

    def __init__(
        self,
        workload: Workload,
        modules: Sequence[nn.Module],
        start: int,
        samples: int,
        device: str,
        *,
        in_flight: int = 1,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._modules = modules
        self._as_tuple = workload.is_tuple(start)
        self._last = start + len(modules) == workload.layers
        self._loss = workload.loss
        self._values, self._wants_grad = layer_inputs(workload, start, samples, device)
        self._targets: Any = layer_targets(workload, samples, device) if self._last else None
        self._trigger = torch.zeros((), requires_grad=True)
        self._fresh: list[Tensor] = []
        self._grads: list[Tensor] | None = None
        self._clock = clock
        self._in_flight = in_flight
        self._outputs: deque[list[Tensor]] = deque()
        """Of every microbatch in flight, oldest first."""
        self._reached = [0.0] * len(modules)
        """By layer: when the gradient of its input was there, in the backward under way; 0: it was not."""
        self._forward_shares: list[float] = []
        self.shares: list[tuple[list[float], list[float]]] = []
        """Of every repetition: each layer's share of the forward and of the backward."""

    def prepare(self) -> None:
        """A copy of the inputs, as a message would leave them: a layer may overwrite it."""
        while len(self._outputs) < self._in_flight - 1:
            self._receive()
            self.forward()
        self._receive()

    def _receive(self) -> None:
        self._fresh = [value.clone() for value in self._values]

    def forward(self) -> None:
        """The layers, and after the last the loss, with a gradient asked for where the worker asks."""
        marks = [self._clock()]
        entered = [
            _Enter.apply(self._trigger, value) if wants else value  # type: ignore[no-untyped-call]
            for value, wants in zip(self._fresh, self._wants_grad, strict=True)
        ]
        value: LayerValue = tuple(entered) if self._as_tuple else entered[0]
        self._fresh = []
        for number, module in enumerate(self._modules):
            if number:
                self._mark(number, value, entered)
                marks.append(self._clock())
            entered = _tensors(value)
            value = as_value(module(value))
        if self._last:
            self._outputs.append([self._loss(value, self._targets)])
        else:
            self._outputs.append([out for out in _tensors(value) if out.requires_grad])
        marks.append(self._clock())
        self._forward_shares = _shares(marks)

    def _mark(self, number: int, value: LayerValue, given: Sequence[Tensor]) -> None:
        """Lets the backward say when it gets to that layer's input: to what the layer before has made."""

        times, clock = self._reached, self._clock  # not self: it holds the graph that will hold this

        def reached(_gradient: Tensor) -> None:
            times[number] = clock()

        wanting = [tensor for tensor in _tensors(value) if tensor.requires_grad]
        made = [tensor for tensor in wanting if all(tensor is not other for other in given)]
        for tensor in made or wanting:
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]

    def between(self) -> None:
        """The outputs' gradients come, with random values, the same ones each time."""
        if not self._last:
            given = self._grads or [torch.randn_like(out) for out in self._outputs[0]]
            self._grads = [gradient.clone() for gradient in given]

    def backward(self, run: Callable[..., None] = torch.autograd.backward) -> None:
        """Of the oldest microbatch in flight."""
        outputs = self._outputs.popleft()
        self._reached[:] = [0.0] * len(self._modules)
        marks = [self._clock()]
        if outputs and not self._last:
            run(outputs, self._grads)
        elif outputs and outputs[0].requires_grad:
            run(outputs, [None])
        end = self._clock()
        for number in range(len(self._modules) - 1, 0, -1):  # a layer whose input gets none ends the backward
            marks.append(max(marks[-1], self._reached[number] or end))
        marks.append(max(marks[-1], end))
        self.shares.append((self._forward_shares, _shares(marks)[::-1]))


def _shares(marks: Sequence[float]) -> list[float]:
    whole = marks[-1] - marks[0]
    if whole <= 0.0:  # a clock too coarse for them
        return [1.0 / (len(marks) - 1)] * (len(marks) - 1)
    return [(b - a) / whole for a, b in pairwise(marks)]


class _Enter(torch.autograd.Function):
    """Gives a tensor a history, neither leaf nor view, so that a layer may change it in place."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004 - trigger makes the graph
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return None, None


class OptimizerSteps:
    """One layer's optimizer step, as the forward part; gradients are there already."""

    def __init__(self, workload: Workload, module: nn.Module, device: str) -> None:
        self._optimizer = workload.optimizer(list(module.parameters()))
        self._elsewhere = Elsewhere(device)

    def prepare(self) -> None:
        """Other layers' updates."""
        self._elsewhere()

    def between(self) -> None:
        """Nothing."""

    def forward(self) -> None:
        """Updates every parameter."""
        self._optimizer.step()

    def backward(self) -> None:
        """Nothing: the worker's zero_grad only drops references."""


def layer_inputs(
    workload: Workload, index: int, samples: int, device: str
) -> tuple[list[Tensor], list[bool]]:
    """Inputs of that layer for that many samples: the workload's own for layer 0, else random floats."""
    specs = workload.boundary(index, samples)
    if index == 0:
        values = _tensors(_batch(workload, samples)[0])
        return [value.to(device) for value in values], [False] * len(values)
    values = []
    for spec in specs:
        dtype = getattr(torch, spec.dtype.removeprefix("torch."))
        if dtype.is_floating_point or dtype.is_complex:
            values.append(torch.randn(spec.shape, dtype=dtype, device=device))
        else:
            values.append(torch.ones(spec.shape, dtype=dtype, device=device))
    return values, [spec.requires_grad for spec in specs]


def layer_targets(workload: Workload, samples: int, device: str) -> Any:
    """Targets of that many samples, on the device."""
    targets = _batch(workload, samples)[1]
    if isinstance(targets, Tensor):
        return targets.to(device)
    return tuple(target.to(device) for target in targets)


def _batch(workload: Workload, samples: int) -> tuple[Any, Any]:
    inputs, targets = next(iter(workload.batches(0, start=0, stop=samples)))
    return inputs, targets


def _tensors(value: Any) -> list[Tensor]:
    """Of a layer's value, or of a batch's inputs."""
    return [value] if isinstance(value, Tensor) else list(value)
