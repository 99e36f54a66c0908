"""One stage: its layers, and the microbatches between their forward and their backward.

What comes in is cut off from the stage before by an autograd node of its own, so that a layer may change its
input in place as it may in one process. What goes out leaves through another such node, so that the stage
does not keep it for the backward. Nothing here knows of pairs, schedules or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.worker.messages import Boundary
from skyctl.worker.recompute import Recomputed
from skyctl.workload.weightgrad import WeightGradients, taken_over

Tensor = torch.Tensor
Value = Tensor | tuple[Tensor, ...]
Layer = Callable[[Any], Any]
Loss = Callable[[Any, Any], Tensor]


class Stage:
    """Layers [start, stop) of a workload.

    Args:
        layers: called one after the other, as ``nn.Sequential`` does.
        takes, gives: the tensors at its two ends by microbatch; ``gives`` is None for the last stage.
        takes_tuple: whether its first layer is called with a tuple.
        before_layer: called with (microbatch, position in the stage) before each layer's forward.
        loss: of the last stage: the mean over a microbatch's samples.
        recompute: keep only each layer's input, and run its forward again in the backward.
        defer_weights: ``backward_inputs`` and ``backward_weights`` are to be used in place of ``backward``.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        takes: Boundary,
        takes_tuple: bool,
        gives: Boundary | None,
        loss: Loss | None,
        recompute: bool = False,
        defer_weights: bool = False,
        before_layer: Callable[[int, int], None] = lambda _microbatch, _position: None,
    ) -> None:
        self.layers = list(layers)
        self.defers_weights = defer_weights
        self._calls: list[Layer] = [Recomputed(layer) for layer in layers] if recompute else list(layers)
        self._takes, self._takes_tuple, self._gives, self._loss = takes, takes_tuple, gives, loss
        self._before_layer = before_layer
        self._trigger = torch.zeros((), requires_grad=True)
        self._kept: dict[int, _Kept] = {}
        self._later: dict[int, WeightGradients] = {}
        self._parameters = self.parameters

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
        kept, outputs = self._run(microbatch, inputs, self._calls)
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        specs = self._gives(microbatch)
        kept.leave([t for t, s in zip(tensors, specs, strict=False) if s.requires_grad and t.requires_grad])
        return tuple(tensor.detach() for tensor in tensors)

    def forward_loss(self, microbatch: int, inputs: tuple[Tensor, ...], targets: Any, share: float) -> Tensor:
        """The last stage: the microbatch's loss times its share of the batch's samples, as a scalar."""
        assert self._loss is not None, "only the last stage has a loss"
        *calls, last = self._calls
        weigh = self._loss

        def scaled(outputs: Any) -> Tensor:
            loss = weigh(as_value(outputs), targets)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise RunError(
                    f"loss(outputs, targets) must give one number, it gave {_shape(loss)}",
                    hint="let it return the mean over the samples",
                )
            return loss.reshape(()) * share

        if isinstance(last, Recomputed):  # what the loss keeps is part of what the last layer does
            kept, loss = self._run(microbatch, inputs, [*calls, last.then(scaled)])
        else:
            kept, loss = self._run(microbatch, inputs, [*self._calls, scaled])
        assert isinstance(loss, Tensor)
        kept.root = loss
        return loss.detach()

    def backward(self, microbatch: int, gradients: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """Adds to the parameters' gradients; returns the gradients of the input, to be sent back.

        Args:
            gradients: of the outputs that require one, in their order; None for the last stage.
        """
        kept, fresh = self._kept.pop(microbatch), self._without_gradient()
        kept.enter(gradients)
        if kept.root is not None and kept.root.requires_grad:
            torch.autograd.backward([kept.root])
        return kept.input_gradients(taken_over(fresh))

    def backward_inputs(self, microbatch: int, gradients: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """As ``backward``, but leaves what it can of the parameters' gradients to ``backward_weights``.

        The gradients given must not change until then.
        """
        kept, fresh = self._kept.pop(microbatch), self._without_gradient()
        kept.enter(gradients)
        later = self._later[microbatch] = WeightGradients()
        if kept.root is not None and kept.root.requires_grad:
            later.backward([kept.root], [None])
        return kept.input_gradients(taken_over(fresh))

    def backward_weights(self, microbatch: int) -> None:
        """Adds what ``backward_inputs`` of this microbatch has left."""
        self._later.pop(microbatch).add()

    def _without_gradient(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.grad is None]

    def _run(
        self, microbatch: int, inputs: tuple[Tensor, ...], calls: Sequence[Layer]
    ) -> tuple[_Kept, Value]:
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
        del inputs
        for position, call in enumerate(calls):
            if position < len(self.layers):  # the loss goes on with what the last layer has left
                self._before_layer(microbatch, position)
            value = as_value(call(value))
        kept = self._kept[microbatch] = _Kept(entry)
        return kept, value


class _Kept:
    """One microbatch between forward and backward. ``root``: what its backward starts from."""

    def __init__(self, entry: _Entry | None) -> None:
        self.entry = entry
        self.root: Tensor | None = None
        self._exit: _Exit | None = None

    def leave(self, outputs: list[Tensor]) -> None:
        """What the next stage will send gradients of."""
        if outputs:
            self._exit = _Exit(len(outputs))
            self.root = _Leave.apply(self._exit, *outputs)  # type: ignore[no-untyped-call]

    def enter(self, gradients: Sequence[Tensor] | None) -> None:
        """The gradients that have come."""
        if self._exit is not None and gradients is not None:
            self._exit.give(gradients)

    def input_gradients(self, taken: set[int]) -> tuple[Tensor, ...]:
        """After the backward: those to be sent.

        Args:
            taken: storages that are parameters' gradients by now: while one is sent, the next microbatch is
                added to it in place.
        """
        found = () if self.entry is None else self.entry.gradients()
        return tuple(g.clone() if taken and g.untyped_storage()._cdata in taken else g for g in found)


class _Exit:
    """Where a microbatch leaves the stage, and its gradients come in."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.gradients: tuple[Tensor, ...] = ()

    def give(self, gradients: Sequence[Tensor]) -> None:
        if len(gradients) != self._count:
            raise RunError(f"{len(gradients)} gradients came back for {self._count} outputs")
        self.gradients = tuple(gradients)


class _Leave(torch.autograd.Function):
    """One number in place of the outputs; its backward gives them their gradients."""

    @staticmethod
    def forward(ctx: Any, exit: _Exit, *outputs: Tensor) -> Tensor:  # noqa: A002
        ctx.exit = exit
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004 — of the number
        gradients = ctx.exit.gradients
        ctx.exit.gradients = ()
        return None, *gradients


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


def as_value(value: Any) -> Any:
    """What a layer gives, as the next one is given it wherever the model is cut: a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _shape(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
