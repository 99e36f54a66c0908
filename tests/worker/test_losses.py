"""Training is the same, whatever the cut and the schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from skyctl.checkpoint.node import safetensors
from skyctl.workload.recipe import microbatch_sizes
from skyctl.workload.workload import load_workload
from skyctl.workload.workload_spec import WorkloadSpec

STEPS = 10
PLANS = [
    # cuts, microbatches of 7 samples (3: 3 2 2, 4: 2 2 2 1), schedule, deeper warm-up
    ([0, 7], 4, "sequential", 0),
    ([0, 7], 3, "1f1b", 0),
    ([0, 3, 7], 4, "sequential", 0),
    ([0, 3, 7], 4, "1f1b", 0),
    ([0, 2, 5, 7], 4, "gpipe", 0),
    ([0, 2, 5, 7], 3, "1f1b", 0),
    ([0, 1, 6, 7], 4, "1f1b", 0),
    ([0, 1, 6, 7], 4, "eager-1f1b", 1),
]
LESS = [
    # the same, then what each rank is told beside it
    ([0, 7], 4, "zero-bubble", 0, {"weights_behind": 2}),
    ([0, 3, 7], 3, "zero-bubble", 1, {"weights_behind": 0}),
    ([0, 2, 5, 7], 4, "zero-bubble", 1, {"weights_behind": 1}),
    ([0, 1, 6, 7], 4, "zero-bubble", 0, {"weights_behind": 3}),
    ([0, 2, 5, 7], 4, "zero-bubble", 0, {"recompute": True}),
    ([0, 2, 5, 7], 4, "1f1b", 0, {"recompute": True}),
    ([0, 3, 7], 3, "gpipe", 0, {"recompute": True}),
]


def reference(workload: dict[str, Any], microbatches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop in one process: losses of every step, and the weights at the end."""
    torch.set_num_threads(1)
    loaded = load_workload(WorkloadSpec.from_dict(workload))
    model = torch.nn.Sequential(*loaded.build(0, loaded.layers, "cpu"))
    optimizer = loaded.optimizer(model.parameters())
    split = microbatch_sizes(workload["batch_size"], microbatches)
    batches = loaded.batches()
    losses = []
    for _ in range(STEPS):
        inputs, targets = next(batches)
        total = 0.0
        for n, x, y in zip(split, inputs.split(split), targets.split(split), strict=True):
            loss = loaded.loss(model(x), y) * (n / sum(split))
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_losses_do_not_depend_on_cut_and_schedule(
    optimizer: str, workload: Callable[..., dict[str, Any]], pool: Any, driver: ModuleType
) -> None:
    spec = workload(optimizer)
    expected = {microbatches: reference(spec, microbatches)[0] for microbatches in (3, 4)}
    assert expected[4][-1] < expected[4][0]
    for cuts, microbatches, schedule, depth in PLANS:
        outcome = pool.run(driver.orders(spec, cuts, microbatches, schedule, STEPS, depth=depth))
        assert not outcome.errors, (cuts, schedule, outcome.errors)
        assert outcome.losses == pytest.approx(expected[microbatches], rel=1e-5), (cuts, schedule)


def test_nor_on_weight_gradients_put_off_or_activations_computed_again(
    workload: Callable[..., dict[str, Any]], pool: Any, driver: ModuleType
) -> None:
    spec = workload("adamw")
    expected = {microbatches: reference(spec, microbatches)[0] for microbatches in (3, 4)}
    for cuts, microbatches, schedule, depth, fields in LESS:
        outcome = pool.run(driver.orders(spec, cuts, microbatches, schedule, STEPS, depth=depth, **fields))
        assert not outcome.errors, (cuts, schedule, fields, outcome.errors)
        assert outcome.losses == expected[microbatches], (cuts, schedule, fields)
        put_off = schedule == "zero-bubble" and "recompute" not in fields
        for events in outcome.steps.values():
            assert all(0 <= event["weight_s"] <= event["backward_s"] for event in events)
            assert any(event["weight_s"] > 0 for event in events) == put_off


def test_equal_to_the_last_bit_and_the_weights_come_out(
    workload: Callable[..., dict[str, Any]], pool: Any, driver: ModuleType
) -> None:
    spec = workload()
    losses, weights = reference(spec, 4)
    outcome = pool.run(driver.orders(spec, [0, 1, 4, 7], 4, "1f1b", STEPS, weights=True))
    assert outcome.losses == losses
    saved: dict[str, torch.Tensor] = {}
    for rank in range(3):
        assert outcome.results[rank]["steps"] == STEPS
        saved |= safetensors.load(Path(outcome.results[rank]["weights"]))
    assert saved.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(saved[name], tensor), name


def test_built_in_model(pool: Any, driver: ModuleType) -> None:
    spec = WorkloadSpec(source="gpt:layers=2,hidden=16,heads=2,context=8", batch_size=4, seed=1).to_dict()
    losses, _ = reference(spec, 2)
    layers = load_workload(WorkloadSpec.from_dict(spec)).layers
    outcome = pool.run(driver.orders(spec, [0, 2, layers], 2, "gpipe", STEPS))
    assert not outcome.errors, outcome.errors
    assert outcome.losses == pytest.approx(losses, rel=1e-5)


def test_nothing_to_differentiate_between_two_stages(
    workload: Callable[..., dict[str, Any]], pool: Any, driver: ModuleType
) -> None:
    """The first stage holds no parameters: only integers go over, and no gradients come back."""
    first = (
        "nn.Sequential(Embed(),",
        "nn.Sequential(nn.Identity(), Embed(),",
    )
    spec = workload(replace=first)
    losses, _ = reference(spec, 4)
    outcome = pool.run(driver.orders(spec, [0, 1, 8], 4, "1f1b", STEPS))
    assert not outcome.errors, outcome.errors
    assert outcome.losses == pytest.approx(losses, rel=1e-5)
