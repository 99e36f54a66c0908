"""One stage: its layers, and the microbatches between their forward and their backward.

What comes in is cut off from the stage before by an autograd node of its own, so that a layer may change its
input in place as it may in one process; what goes out goes back through ``torch.autograd.backward``. Nothing
here knows of pairs, schedules or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.worker.messages import Boundary

Tensor = torch.Tensor
Value = Tensor | tuple[Tensor, ...]
Loss = Callable[[Any, Any], Tensor]


class Stage:
    """Layers [start, stop) of a workload.

    Args:
        layers: called one after the other, as ``nn.Sequential`` does.
        takes, gives: the tensors at its two ends by microbatch; ``gives`` is None for the last stage.
        takes_tuple: whether its first layer is called with a tuple.
        before_layer: called with (microbatch, position in the stage) before each layer's forward.
        loss: of the last stage: the mean over a microbatch's samples.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        takes: Boundary,
        takes_tuple: bool,
        gives: Boundary | None,
        loss: Loss | None,
        before_layer: Callable[[int, int], None] = lambda _microbatch, _position: None,
    ) -> None:
        self.layers = list(layers)
        self._takes, self._takes_tuple, self._gives, self._loss = takes, takes_tuple, gives, loss
        self._before_layer = before_layer
        self._trigger = torch.zeros((), requires_grad=True)
        self._kept: dict[int, _Kept] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once, in the layers' order."""
        found: dict[int, nn.Parameter] = {}
        for layer in self.layers:
            for parameter in layer.parameters():
                found.setdefault(id(parameter), parameter)
        return list(found.values())

    @property
    def kept(self) -> int:
        """How many microbatches are between forward and backward."""
        return len(self._kept)

    def forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Every stage but the last: the output's tensors, to be sent on.

        Args:
            inputs: buffers of this microbatch alone; they may be overwritten.
        """
        assert self._gives is not None, "the last stage gives a loss"
        outputs = self._run(microbatch, inputs)
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        kept = self._kept[microbatch]
        specs = self._gives(microbatch)
        kept.outputs = [
            t for t, s in zip(tensors, specs, strict=False) if s.requires_grad and t.requires_grad
        ]
        return tuple(tensor.detach() for tensor in tensors)

    def forward_loss(self, microbatch: int, inputs: tuple[Tensor, ...], targets: Any, share: float) -> Tensor:
        """The last stage: the microbatch's loss times its share of the batch's samples, as a scalar."""
        assert self._loss is not None, "only the last stage has a loss"
        outputs = self._run(microbatch, inputs)
        loss = self._loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise RunError(
                f"loss(outputs, targets) must give one number, it gave {_shape(loss)}",
                hint="let it return the mean over the samples",
            )
        scaled = loss.reshape(()) * share
        self._kept[microbatch].outputs = [scaled]
        return scaled.detach()

    def backward(self, microbatch: int, gradients: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """Adds to the parameters' gradients; returns the gradients of the input, to be sent back.

        Args:
            gradients: of the outputs that require one, in their order; None for the last stage.
        """
        kept = self._kept.pop(microbatch)
        given: Sequence[Tensor | None] = [None] * len(kept.outputs) if gradients is None else gradients
        reached = [(t, g) for t, g in zip(kept.outputs, given, strict=True) if t.requires_grad]
        if reached:
            torch.autograd.backward([t for t, _ in reached], [g for _, g in reached])
        if kept.entry is None:
            return ()
        return kept.entry.gradients()

    def _run(self, microbatch: int, inputs: tuple[Tensor, ...]) -> Value:
        specs = self._takes(microbatch)
        differentiable = [t for t, s in zip(inputs, specs, strict=True) if s.requires_grad]
        entry = None
        if differentiable:
            entry = _Entry(differentiable)
            through = iter(entry.enter(self._trigger))
            inputs = tuple(
                next(through) if s.requires_grad else t for t, s in zip(inputs, specs, strict=True)
            )
        value: Any = inputs if self._takes_tuple else inputs[0]
        for position, layer in enumerate(self.layers):
            self._before_layer(microbatch, position)
            value = layer(value)
        self._kept[microbatch] = _Kept(entry)
        return tuple(value) if isinstance(value, list) else value


class _Kept:
    __slots__ = ("entry", "outputs")

    def __init__(self, entry: _Entry | None) -> None:
        self.entry = entry
        self.outputs: list[Tensor] = []


class _Entry:
    """Where a microbatch enters the stage: gives its tensors a history, and catches their gradients."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors: list[Tensor] | None = tensors
        self.caught: tuple[Tensor, ...] | None = None
        self._like = [(t.shape, t.dtype, t.device) for t in tensors]

    def enter(self, trigger: Tensor) -> tuple[Tensor, ...]:
        out = _Cut.apply(trigger, self)  # type: ignore[no-untyped-call]
        self.tensors = None
        return out if isinstance(out, tuple) else (out,)

    def gradients(self) -> tuple[Tensor, ...]:
        """Zeros where the loss does not depend on this input at all."""
        if self.caught is not None:
            return self.caught
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self._like)


class _Cut(torch.autograd.Function):
    """Returns the entry's tensors, not as inputs or views of any: in-place operations on them are allowed."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, entry: _Entry) -> Any:  # noqa: ARG004 — trigger makes the graph
        ctx.entry = entry
        assert entry.tensors is not None
        return tuple(entry.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.entry.caught = gradients
        return None, None


def _shape(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
