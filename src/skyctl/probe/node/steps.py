"""One repetition of what a worker does with a layer: forward and backward, or the optimizer's step.

A layer's inputs are detached tensors that require a gradient where the worker's would; the last layer's part
includes the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.probe.node.cache import Elsewhere
from skyctl.worker.stage import as_value
from skyctl.workload.workload import Workload

LayerValue = Tensor | tuple[Tensor, ...]


class LayerSteps:
    """One layer at one microbatch size: forward, then backward, as the worker's executor does it."""

    def __init__(self, workload: Workload, module: nn.Module, index: int, samples: int, device: str) -> None:
        self._module = module
        self._as_tuple = workload.is_tuple(index)
        self._last = index == workload.layers - 1
        self._loss = workload.loss
        self._values, self._wants_grad = layer_inputs(workload, index, samples, device)
        self._targets: Any = layer_targets(workload, samples, device) if self._last else None
        self._trigger = torch.zeros((), requires_grad=True)
        self._fresh: list[Tensor] = []
        self._grads: list[Tensor] | None = None
        self._outputs: list[Tensor] = []
        self._elsewhere = Elsewhere(device)

    def prepare(self) -> None:
        """A copy of the inputs, as a message would leave them: a layer may overwrite it."""
        self._elsewhere()
        self._fresh = [value.clone() for value in self._values]

    def forward(self) -> None:
        """The layer, and on the last layer the loss, with a gradient asked for where the worker asks."""
        entered = [
            _Enter.apply(self._trigger, value) if wants else value  # type: ignore[no-untyped-call]
            for value, wants in zip(self._fresh, self._wants_grad, strict=True)
        ]
        given: LayerValue = tuple(entered) if self._as_tuple else entered[0]
        self._fresh = []
        result = as_value(self._module(given))
        if self._last:
            self._outputs = [self._loss(result, self._targets)]
        else:
            outputs = list(result) if isinstance(result, tuple) else [result]
            self._outputs = [out for out in outputs if out.requires_grad]

    def between(self) -> None:
        """Other layers run."""
        self._elsewhere()

    def backward(self, run: Callable[..., None] = torch.autograd.backward) -> None:
        """With random gradients of the outputs' shapes, the same ones each time."""
        if self._outputs and not self._last:
            if self._grads is None:
                self._grads = [torch.randn_like(out) for out in self._outputs]
            run(self._outputs, self._grads)
        elif self._outputs and self._outputs[0].requires_grad:
            run(self._outputs, [None])
        self._outputs = []


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
        """Nothing is used up."""
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
    return [value] if isinstance(value, Tensor) else list(value)
