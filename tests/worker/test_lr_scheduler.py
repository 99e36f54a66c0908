"""The user's learning-rate scheduler: the rates of a step depend on its number alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from skyctl.errors import WorkloadError
from skyctl.worker.updates.lr_scheduler import LearningRateScheduler
from skyctl.workload.recipe import Recipe

STEPS = 12
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "closed": lambda o: torch_schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
    "one cycle": lambda o: torch_schedulers.OneCycleLR(o, 0.5, total_steps=STEPS),
    "cyclic": lambda o: torch_schedulers.CyclicLR(o, 0.01, 0.3, step_size_up=3),
    "cosine": lambda o: torch_schedulers.CosineAnnealingLR(o, STEPS),
    "restarts": lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 3),
    "chained": lambda o: torch_schedulers.ChainedScheduler(
        [torch_schedulers.ExponentialLR(o, 0.9), torch_schedulers.ConstantLR(o, 0.5, 4)]
    ),
    "sequential": lambda o: torch_schedulers.SequentialLR(
        o,
        [torch_schedulers.LinearLR(o, 0.1, 1.0, 3), torch_schedulers.StepLR(o, 2)],
        milestones=[4],
    ),
}


def optimizer() -> torch.optim.Optimizer:
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    weight.grad, bias.grad = torch.ones(2), torch.ones(2)
    return torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [bias]}], lr=0.2, momentum=0.9)


def groups_by_step(make: Callable[[torch.optim.Optimizer], Any], first: int) -> list[list[Any]]:
    """(rate, momentum) of each group, by step from ``first`` on."""
    own_optimizer = optimizer()
    scheduler = LearningRateScheduler(own_optimizer, Recipe(), first, make)
    assert "lr" in scheduler.options
    groups = []
    for _ in range(first, STEPS):
        groups.append([(group["lr"], group["momentum"]) for group in own_optimizer.param_groups])
        own_optimizer.step()
        scheduler.advance()
    return groups


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_run_has_the_rates_of_one_that_goes_through(name: str) -> None:
    whole = groups_by_step(SCHEDULERS[name], 0)
    assert len({step[0] for step in map(tuple, whole)}) > 1, "they move"
    for first in (1, 5, STEPS):
        assert groups_by_step(SCHEDULERS[name], first) == whole[first:]


def test_options_that_a_scheduler_moves_are_not_restored() -> None:
    for first in (0, 3):
        scheduler = LearningRateScheduler(optimizer(), Recipe(), first, SCHEDULERS["one cycle"])
        assert {"lr", "momentum"} <= scheduler.options
        assert not scheduler.options & {"weight_decay", "params"}
    assert LearningRateScheduler(optimizer(), Recipe()).options == frozenset()
    assert LearningRateScheduler(None, Recipe(), 3, pytest.fail).learning_rate is None


def test_a_scheduler_that_ends_before_the_run_is_said() -> None:
    own_optimizer = optimizer()
    scheduler = LearningRateScheduler(own_optimizer, Recipe(), 0, SCHEDULERS["one cycle"])
    for _ in range(STEPS):
        own_optimizer.step()
        scheduler.advance()
    with pytest.raises(
        WorkloadError, match=r"the OneCycleLR of lr_scheduler\(\) gives .* for step 14"
    ) as caught:
        scheduler.advance()
    assert "lr_scheduler(optimizer, steps)" in str(caught.value.hint)


def test_a_rate_that_is_no_number_is_said() -> None:
    own_optimizer = optimizer()
    scheduler = LearningRateScheduler(
        own_optimizer,
        Recipe(),
        0,
        lambda o: torch_schedulers.LambdaLR(o, lambda step: float("nan") if step else 1.0),
    )
    own_optimizer.step()
    with pytest.raises(WorkloadError, match=r"the learning rates of step 2 are \[nan, nan\]"):
        scheduler.advance()
