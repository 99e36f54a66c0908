"""One stage of the pipeline: its layers, and the microbatches between their forward and their backward.

The inputs are separated from the stage before by an autograd node, so that a layer may change its input in
place as it may in one process. The outputs leave through another such node, so that the stage does not keep
them for the backward. Nothing here knows of connections, schedules or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.worker.pipeline.activation_recompute import RecomputedLayer
from skyctl.worker.pipeline.messages import MessageSpecs
from skyctl.workload.received_values import InputCapture, attach_inputs
from skyctl.workload.structures import (
    Structure,
    StructureMismatchError,
    Value,
    check_value,
    copy_containers,
    flatten_as,
    unflatten_value,
)
from skyctl.workload.weight_gradients import DeferredWeightGradients, adopted_storages

Tensor = torch.Tensor
LayerCall = Callable[[Any], Any]
LossFunction = Callable[[Any, Any], Tensor]


class PipelineStage:
    """Layers [start, stop) of a workload, as one stage of the pipeline.

    Args:
        layers: called one after the other, as ``nn.Sequential`` does.
        input_specs, output_specs: the tensors at its two ends by microbatch; ``output_specs`` is None for the
            last stage.
        input_structure, output_structure: of the values that these tensors make up there.
        loss_fn: on the last stage, (outputs, targets) → the mean over a microbatch's samples.
        recompute: keep only each layer's input, and run its forward again in the backward.
        defer_weights: ``backward_inputs`` and ``backward_weights`` are to be used in place of ``backward``.
        before_layer: called with (microbatch, position in the stage) before each layer's forward.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        input_specs: MessageSpecs,
        output_specs: MessageSpecs | None,
        loss_fn: LossFunction | None,
        input_structure: Structure = None,
        output_structure: Structure = None,
        recompute: bool = False,
        defer_weights: bool = False,
        before_layer: Callable[[int, int], None] = lambda _microbatch, _position: None,
    ) -> None:
        self.layers = list(layers)
        self.defers_weights = defer_weights
        self._input_structure, self._output_structure = input_structure, output_structure
        self._calls: list[LayerCall] = (
            [RecomputedLayer(layer) for layer in layers] if recompute else list(layers)
        )
        self._input_specs, self._output_specs, self._loss_fn = input_specs, output_specs, loss_fn
        self._before_layer = before_layer
        self._saved: dict[int, _SavedMicrobatch] = {}
        self._deferred: dict[int, DeferredWeightGradients] = {}
        self._parameters = self.parameters

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once, in the layers' order."""
        parameters: dict[int, nn.Parameter] = {}
        for layer in self.layers:
            for parameter in layer.parameters():
                parameters.setdefault(id(parameter), parameter)
        return list(parameters.values())

    @property
    def in_flight(self) -> int:
        """How many microbatches are between forward and backward."""
        return len(self._saved)

    def input_value(self, tensors: Sequence[Tensor]) -> Value:
        """The value that the first layer is called with, of the tensors that enter the stage."""
        return unflatten_value(tensors, self._input_structure)

    def output_tensors(self, value: Value) -> tuple[Tensor, ...]:
        """The tensors to be sent of what the last layer has given.

        Raises:
            RunError: its keys or parts are not those that it gave when the workload was loaded.
        """
        try:
            return flatten_as(value, self._output_structure, "its output")
        except StructureMismatchError as exc:
            raise RunError(
                f"layer {type(self.layers[-1]).__name__} gives {exc.place} {exc.received}, {exc.wanted} when "
                "the workload was loaded",
                hint="let it give the same keys and parts for every batch, in train() and in eval()",
            ) from exc

    def forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The forward of every stage but the last; returns the output's tensors, to be sent on.

        Args:
            inputs: buffers of this microbatch alone; they may be overwritten.
        """
        assert self._output_specs is not None, "the last stage gives a loss"
        saved, outputs = self._run(microbatch, inputs, self._calls)
        tensors = self.output_tensors(outputs)
        specs = self._output_specs(microbatch)
        saved.detach_outputs(
            [t for t, s in zip(tensors, specs, strict=False) if s.requires_grad and t.requires_grad]
        )
        return tuple(tensor.detach() for tensor in tensors)

    def forward_loss(self, microbatch: int, inputs: tuple[Tensor, ...], targets: Any, share: float) -> Tensor:
        """The last stage's forward: the microbatch's loss times its share of the batch's samples (scalar)."""
        assert self._loss_fn is not None, "only the last stage has a loss"
        *calls, last = self._calls
        loss_fn = self._loss_fn

        def scaled_loss(outputs: Any) -> Tensor:
            loss = loss_fn(layer_value(outputs), copy_containers(targets))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise RunError(
                    f"loss(outputs, targets) must give one number, it gave {_shape(loss)}",
                    hint="let it return the mean over the samples",
                )
            return loss.reshape(()) * share

        if isinstance(last, RecomputedLayer):  # what the loss saves belongs to the last layer's recomputation
            saved, loss = self._run(microbatch, inputs, [*calls, last.followed_by(scaled_loss)])
        else:
            saved, loss = self._run(microbatch, inputs, [*self._calls, scaled_loss])
        assert isinstance(loss, Tensor)
        saved.root = loss
        return loss.detach()

    def backward(self, microbatch: int, gradients: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """Adds to the parameters' gradients; returns the gradients of the input, to be sent back.

        Args:
            gradients: of the outputs that require one, in their order; None for the last stage.
        """
        return self._backward(microbatch, gradients, torch.autograd.backward)

    def backward_inputs(self, microbatch: int, gradients: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """As ``backward``, but leaves what it can of the parameters' gradients to ``backward_weights``.

        The gradients given must not change until then.
        """
        deferred = self._deferred[microbatch] = DeferredWeightGradients()
        return self._backward(microbatch, gradients, lambda roots: deferred.backward(roots, [None]))

    def backward_weights(self, microbatch: int) -> None:
        """Adds what ``backward_inputs`` of this microbatch has left."""
        self._deferred.pop(microbatch).add()

    def _backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor] | None,
        run: Callable[[list[Tensor]], None],
    ) -> tuple[Tensor, ...]:
        saved = self._saved.pop(microbatch)
        without_gradient = [parameter for parameter in self._parameters if parameter.grad is None]
        saved.receive_gradients(gradients)
        if saved.root is not None and saved.root.requires_grad:
            run([saved.root])
        return saved.input_gradients(adopted_storages(without_gradient))

    def _run(
        self, microbatch: int, inputs: tuple[Tensor, ...], calls: Sequence[LayerCall]
    ) -> tuple[_SavedMicrobatch, Value]:
        specs = self._input_specs(microbatch)
        inputs, capture = attach_inputs(inputs, [spec.requires_grad for spec in specs])
        value = self.input_value(inputs)
        del inputs
        for position, call in enumerate(calls):
            if position < len(self.layers):  # the loss continues the random numbers of the last layer
                self._before_layer(microbatch, position)
            value = layer_value(call(value))
        saved = self._saved[microbatch] = _SavedMicrobatch(capture)
        return saved, value


class _SavedMicrobatch:
    """One microbatch between forward and backward. ``root``: the tensor that its backward starts from."""

    def __init__(self, capture: InputCapture | None) -> None:
        self.root: Tensor | None = None
        self._capture = capture
        self._output_gradients: _OutputGradients | None = None

    def detach_outputs(self, outputs: list[Tensor]) -> None:
        """Takes the outputs that the next stage will send gradients of."""
        if outputs:
            self._output_gradients = _OutputGradients(len(outputs))
            self.root = _OutputGate.apply(self._output_gradients, *outputs)  # type: ignore[no-untyped-call]

    def receive_gradients(self, gradients: Sequence[Tensor] | None) -> None:
        """Takes the gradients of these outputs."""
        if self._output_gradients is not None and gradients is not None:
            self._output_gradients.set(gradients)

    def input_gradients(self, adopted: set[int]) -> tuple[Tensor, ...]:
        """The gradients to be sent back, after the backward.

        Args:
            adopted: storages that are parameters' gradients by now: while one is sent, the next microbatch is
                added to it in place.
        """
        gradients = () if self._capture is None else self._capture.gradients()
        return tuple(g.clone() if adopted and g.untyped_storage()._cdata in adopted else g for g in gradients)


class _OutputGradients:
    """The gradients of a microbatch's outputs, on their way from the next stage into the backward."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.gradients: tuple[Tensor, ...] = ()

    def set(self, gradients: Sequence[Tensor]) -> None:
        if len(gradients) != self._count:
            raise RunError(f"{len(gradients)} gradients came back for {self._count} outputs")
        self.gradients = tuple(gradients)


class _OutputGate(torch.autograd.Function):
    """One number in place of the outputs; its backward gives them their gradients."""

    @staticmethod
    def forward(ctx: Any, output_gradients: _OutputGradients, *outputs: Tensor) -> Tensor:
        ctx.output_gradients = output_gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004 — of the number
        gradients = ctx.output_gradients.gradients
        ctx.output_gradients.gradients = ()
        return None, *gradients


def layer_value(output: Any) -> Value:
    """A layer's output as the next layer is called with it, wherever the model is cut (``check_value``)."""
    return check_value(output, "output", "a layer")


def _shape(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
