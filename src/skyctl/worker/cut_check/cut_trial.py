"""The layers that a workload is cut into, trained as stages would: each layer a stage of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.worker.cut_check.trial import STEPS, Batches, Trial, held_tensors, output_tensors
from skyctl.worker.pipeline.stage import PipelineStage, layer_value
from skyctl.workload.structures import unflatten_value
from skyctl.workload.workload import Workload


@dataclass(frozen=True)
class Execution:
    """How stages run. ``name``: as errors call it; ``cause``: what a difference is likely to come from."""

    name: str
    zero_bubble: bool = False
    recompute: bool = False
    cause: str | None = None


EXECUTIONS = (
    Execution("1F1B, each layer on a machine of its own"),
    Execution("zero-bubble", zero_bubble=True, cause="a gradient that depends on when weights get theirs"),
    Execution(
        "recomputation",
        recompute=True,
        cause="a layer that does something else when it is run again: a number that it changes, draws from "
        "NumPy or from a generator of its own",
    ),
)


def layer_prefixes(workload: Workload) -> list[str]:
    """By layer, what stands before its own names in the whole model's."""
    return ["" if workload.model.ordinary else f"{index}." for index in range(workload.layers)]


class StageChain:
    """Stages one after the other in this process; what they would send is copied."""

    def __init__(self, workload: Workload, layers: Sequence[nn.Module], how: Execution, samples: int) -> None:
        self.trial = Trial()
        count = len(layers)
        self._stages = [
            PipelineStage(
                [layer],
                input_specs=self._specs(workload, index, samples),
                input_structure=workload.structure(index),
                output_specs=None if index + 1 == count else self._specs(workload, index + 1, samples),
                output_structure=workload.structure(index + 1),
                loss_fn=self._loss(workload) if index + 1 == count else None,
                recompute=how.recompute,
                defer_weights=how.zero_bubble,
            )
            for index, layer in enumerate(layers)
        ]
        self._zero_bubble = how.zero_bubble
        owned: set[int] = set()
        self.optimizers = []
        for stage in self._stages:  # of a tied parameter the first stage has the one update that there is
            own = [p for p in stage.parameters if id(p) not in owned]
            owned |= {id(p) for p in own}
            if any(p.requires_grad for p in own):
                self.optimizers.append(workload.optimizer(own))

    @staticmethod
    def _specs(workload: Workload, index: int, samples: int) -> Any:
        specs = tuple(workload.boundary(index, samples))
        return lambda _microbatch: specs

    def _loss(self, workload: Workload) -> Any:
        def loss(outputs: Any, targets: Any) -> Tensor:
            self._seen = output_tensors(outputs)
            return workload.loss(outputs, targets)

        return loss

    def forward(self, microbatch: int, tensors: tuple[Tensor, ...], targets: Any, share: float) -> None:
        """A microbatch through all stages."""
        *others, last = self._stages
        for stage in others:
            tensors = tuple(t.clone() for t in stage.forward(microbatch, tensors))
        loss = last.forward_loss(microbatch, tensors, targets, share)
        self.trial.outputs.append(self._seen)
        self.trial.losses.append(float(loss))

    def backward(self, microbatch: int) -> None:
        """A microbatch back through all stages."""
        gradients: tuple[Tensor, ...] | None = None
        for stage in reversed(self._stages):
            run = stage.backward_inputs if self._zero_bubble else stage.backward
            gradients = tuple(g.clone() for g in run(microbatch, gradients))

    def backward_weights(self, microbatch: int) -> None:
        """The weight gradients that were put off."""
        for stage in self._stages if self._zero_bubble else ():
            stage.backward_weights(microbatch)


def cut_trial(workload: Workload, layers: list[nn.Module], how: Execution, batches: Batches) -> Trial:
    """Two steps of a workload's layers as stages run them."""
    chain = StageChain(workload, layers, how, batches.samples)
    trial = chain.trial
    named = list(zip(layer_prefixes(workload), layers, strict=True))
    for layer in layers:
        layer.train()
    for step in range(STEPS):
        parts = batches.step(step)
        for microbatch, (tensors, targets) in enumerate(parts):
            batches.seed(step, microbatch)
            chain.forward(microbatch, tensors, targets, 1 / len(parts))
        for microbatch in range(len(parts)):
            chain.backward(microbatch)
        for microbatch in range(len(parts)):
            chain.backward_weights(microbatch)
        held = dict(held_tensors(named))
        if step == 0:
            trial.gradients = {n: t.grad.clone() for n, t in held.items() if t.is_leaf and t.grad is not None}
        for number, optimizer in enumerate(chain.optimizers):
            batches.seed(step, len(parts) + number)  # each machine's generators are its own
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    trial.parameters = {n: t.detach().clone() for n, t in held.items() if isinstance(t, nn.Parameter)}
    trial.buffers = {n: t.detach().clone() for n, t in held.items() if not isinstance(t, nn.Parameter)}
    trial.evaluated = _evaluate(workload, layers, batches)
    return trial


def _evaluate(workload: Workload, layers: Sequence[nn.Module], batches: Batches) -> tuple[Tensor, ...]:
    ((tensors, _), *_) = batches.step(STEPS)
    for layer in layers:
        layer.eval()
    batches.seed(STEPS, 0)
    value: Any = unflatten_value(tensors, workload.structure(0))
    with torch.no_grad():
        for layer in layers:
            value = layer_value(layer(value))
    return output_tensors(value)
