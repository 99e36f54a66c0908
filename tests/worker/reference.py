"""The plain loop in one process that a pipeline must equal, with all that a recipe can ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.workload.mixed_precision import accumulate_into_master, master_of
from skyctl.workload.recipe import Recipe, microbatch_sizes
from skyctl.workload.workload import Workload, load_workload
from skyctl.workload.workload_spec import WorkloadSpec


@dataclass
class Reference:
    """The figures that the loop saw, a value a step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    workload: dict[str, Any],
    microbatches: int,
    recipe: Recipe,
    settles: Callable[[int], bool] = lambda _step: True,
) -> Reference:
    """``recipe.total_steps`` steps with torch's own tools for clipping.

    ``settles``: whether the gradients of a step are applied before the next one; else they are after it,
    and with an optimizer that has momentum that step's weights are extrapolated by the update before.
    """
    torch.set_num_threads(1)
    loaded = load_workload(WorkloadSpec.from_dict(workload))
    layers = loaded.build(0, loaded.layers, "cpu")
    parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad))
    masters = [master_of(p) for p in parameters]
    optimizer = loaded.optimizer(parameters)
    own = [group["lr"] for group in optimizer.param_groups]
    randomness = LayerSeeder(loaded._spec.seed, 0, torch.device("cpu"))
    split = microbatch_sizes(workload["batch_size"], microbatches)
    batches, reference = loaded.batches(), Reference()
    late: list[tuple[int, list[torch.Tensor | None]]] = []
    before: list[torch.Tensor] = []

    def update(step: int, gradients: list[torch.Tensor | None]) -> None:
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate * recipe.learning_rate_factor(step, recipe.min_learning_rate / rate)
        reference.rates.append(optimizer.param_groups[0]["lr"])
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        if recipe.clip_norm is not None:
            reference.norms.append(torch.nn.utils.clip_grad_norm_(masters, recipe.clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()

    for step in range(recipe.total_steps):
        randomness.step = step
        now = [master.detach().clone() for master in masters]
        if before and _has_momentum(optimizer):
            _set(parameters, [2 * x - y for x, y in zip(now, before, strict=True)])
        inputs, targets = next(batches)
        assert isinstance(inputs, torch.Tensor)
        assert isinstance(targets, torch.Tensor)
        total = 0.0
        parts = zip(split, torch.split(inputs, split), torch.split(targets, split), strict=True)
        for microbatch, (n, x, y) in enumerate(parts):
            value = x
            for position, layer in enumerate(layers):
                randomness(microbatch, position)
                value = layer(value)
            loss = loaded.loss(value, y) * (n / sum(split))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        reference.losses.append(total)
        for parameter in parameters:
            accumulate_into_master(parameter)
        late.append((step, [master.grad for master in masters]))
        for master in masters:
            master.grad = None
        _set(parameters, now)
        before = [] if settles(step) or len(late) < 2 else now
        while len(late) > (not settles(step)):
            update(*late.pop(0))
        if recipe.validates(step, last=step + 1 == recipe.total_steps):
            reference.validation[step] = validate(loaded, layers, split, recipe.validate_batches)
    reference.weights = {
        f"{i}.{name}": master_of(p).detach()
        for i, layer in enumerate(layers)
        for name, p in layer.named_parameters()
    }
    return reference


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    names = ("exp_avg", "momentum_buffer")
    return any(state.get(name) is not None for state in optimizer.state.values() for name in names)


def _set(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            master_of(parameter).copy_(value)
            if master_of(parameter) is not parameter:
                parameter.copy_(value)


def validate(loaded: Workload, layers: list[torch.nn.Module], split: list[int], number: int) -> float:
    """The mean loss over the first ``number`` held-out batches, layers in eval()."""
    losses = []
    for layer in layers:
        layer.eval()
    with torch.no_grad():
        for _, (inputs, targets) in zip(range(number), loaded.validation(), strict=False):
            assert isinstance(inputs, torch.Tensor)
            assert isinstance(targets, torch.Tensor)
            parts = zip(split, torch.split(inputs, split), torch.split(targets, split), strict=True)
            for n, x, y in parts:
                value = x
                for layer in layers:
                    value = layer(value)
                losses.append((n, loaded.loss(value, y).item()))
    for layer in layers:
        layer.train()
    return sum(n * loss for n, loss in losses) / sum(n for n, _ in losses)
