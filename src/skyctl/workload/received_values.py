"""The values that a layer receives where the model is cut: tensors that are results to autograd, not leaves.

Torch refuses to change a leaf in place that requires a gradient. In one process, what the layer before gave
is no leaf. So every tensor passes a node of the graph here: in training, in the probe and on fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skyctl.workload.structures import Value, map_tensors, value_tensors


class InputCapture:
    """Gives received tensors a place in the autograd graph, and captures their gradients there.

    Args:
        tensors: they require no gradient yet, and are views of nothing; layers may overwrite them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors: Sequence[Tensor] | None = tensors
        self.captured: tuple[Tensor, ...] | None = None
        self._like = [(t.shape, t.dtype, t.device) for t in tensors]

    def attach(self) -> tuple[Tensor, ...]:
        """The tensors themselves, as a layer may take them; once only."""
        root = torch.zeros((), requires_grad=True)
        out = _InputGate.apply(root, self)  # type: ignore[no-untyped-call]
        self.tensors = None
        return out if isinstance(out, tuple) else (out,)

    def gradients(self) -> tuple[Tensor, ...]:
        """The inputs' gradients; zeros where the loss does not depend on these inputs at all."""
        if self.captured is not None:
            return self.captured
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self._like)


class _InputGate(torch.autograd.Function):
    """Returns the tensors to attach, not as inputs or views of any: in-place operations on them are allowed.

    ``root``, which requires a gradient, is what makes autograd record the call.
    """

    @staticmethod
    def forward(ctx: Any, root: Tensor, capture: InputCapture) -> Any:  # noqa: ARG004
        ctx.capture = capture
        assert capture.tensors is not None
        return tuple(capture.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.capture.captured = gradients
        return None, None


def attach_inputs(
    tensors: Sequence[Tensor], requires_grad: Sequence[bool]
) -> tuple[tuple[Tensor, ...], InputCapture | None]:
    """(the tensors, those that require a gradient as the graph's own; what captures these gradients)."""
    differentiable = [t for t, wanted in zip(tensors, requires_grad, strict=True) if wanted]
    if not differentiable:
        return tuple(tensors), None
    capture = InputCapture(differentiable)
    attached = iter(capture.attach())
    return tuple(
        next(attached) if wanted else t for t, wanted in zip(tensors, requires_grad, strict=True)
    ), capture


def received_value(value: Value) -> Value:
    """A layer's outputs as the next stage receives them: the same values, without their history."""
    tensors = value_tensors(value)
    received, _ = attach_inputs([t.detach() for t in tensors], [t.requires_grad for t in tensors])
    following = iter(received)
    return map_tensors(lambda _: next(following), value)
