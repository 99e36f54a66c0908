"""The user's own objects in plain torch: ``model()``, ``loss`` and ``optimizer(model.parameters())``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.worker.cut_check.trial import STEPS, Batches, Trial, held_tensors, output_tensors
from skyctl.workload.autocut.module_cutter import bind_inputs
from skyctl.workload.deferred_init import seeded_generators
from skyctl.workload.parameter_names import name_parameters
from skyctl.workload.structures import unflatten_value
from skyctl.workload.workload import Workload


@dataclass(frozen=True)
class PlainModel:
    """The model that model() gives, made anew.

    Attributes:
        modules: with the prefix of their names in the whole model's weights.
        given: what is called, if model() gave one module.
        ordinary: its forward takes its inputs by place or name; else a layer gets one value.
    """

    modules: list[tuple[str, nn.Module]]
    given: nn.Module | None
    ordinary: bool

    @classmethod
    def make(cls, workload: Workload, seed: int) -> PlainModel:
        """Calls model() under a seed.

        If there is no user's model() (built in, ``hf:``), the layers in one process are the model.
        """
        make, ordinary = workload.model.make, workload.model.ordinary
        with seeded_generators(seed, "plain model"):
            given: Any = make() if make is not None else workload.build(0, workload.layers)
        if ordinary:
            model = cls([("", given)], given, ordinary)
        else:
            whole = given if isinstance(given, nn.Sequential) else None
            layers = given.children() if isinstance(given, nn.ModuleList) else given
            model = cls([(f"{index}.", layer) for index, layer in enumerate(layers)], whole, ordinary)
        for prefix, module in model.modules:
            names = {name: prefix + name for name, _ in module.named_parameters(remove_duplicate=False)}
            name_parameters(module, names)
        return model

    def tensors(self) -> dict[str, Tensor]:
        """All that it holds, by name."""
        return dict(held_tensors(self.modules))

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once."""
        parameters = {id(p): p for _, module in self.modules for p in module.parameters()}
        return list(parameters.values())

    def to(self, device: torch.device) -> PlainModel:
        """Moves it, in place."""
        for _, module in self.modules:
            module.to(device)
        return self

    def train(self, *, mode: bool) -> None:
        """As ``model.train(mode)``."""
        for module in [self.given] if self.given is not None else [m for _, m in self.modules]:
            module.train(mode)

    def __call__(self, value: Any) -> Any:
        if self.ordinary:
            assert self.given is not None
            args, kwargs = bind_inputs(self.given.forward, value)
            return self.given(*args, **kwargs)
        if self.given is not None:
            return self.given(value)
        for _, layer in self.modules:
            value = layer(value)
        return value

    @torch.no_grad()
    def begin_with(self, weights: Mapping[str, Tensor]) -> None:
        """Takes these values, in place."""
        for name, tensor in self.tensors().items():
            if name in weights:
                tensor.data.copy_(weights[name])


def plain_trial(model: PlainModel, workload: Workload, batches: Batches, names: Collection[str]) -> Trial:
    """Two steps of plain torch with a model, which trains.

    Args:
        names: the layers' names of tensors; a tied one may have more in the model.
    """
    trial = Trial()
    structure = workload.structure(0)
    optimizer = workload.optimizer(model.parameters())
    model.train(mode=True)
    for step in range(STEPS):
        parts = batches.step(step)
        for microbatch, (tensors, targets) in enumerate(parts):
            batches.seed(step, microbatch)
            outputs = model(unflatten_value(tensors, structure))
            seen = output_tensors(outputs)
            loss = workload.loss(outputs, targets) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            trial.outputs.append(seen)
            trial.losses.append(float(loss.detach()))
        named = {name: tensor for name, tensor in model.tensors().items() if name in names}
        if step == 0:
            trial.gradients = {
                n: t.grad.clone() for n, t in named.items() if t.is_leaf and t.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    trial.parameters = {n: t.detach().clone() for n, t in named.items() if isinstance(t, nn.Parameter)}
    trial.buffers = {n: t.detach().clone() for n, t in named.items() if not isinstance(t, nn.Parameter)}
    model.train(mode=False)
    ((tensors, _), *_) = batches.step(STEPS)
    batches.seed(STEPS, 0)
    with torch.no_grad():
        trial.evaluated = output_tensors(model(unflatten_value(tensors, structure)))
    return trial
