"""The learning rate of a stage's optimizer over the run: warm-up, then constant, linear or cosine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from skyctl.errors import WorkloadError
from skyctl.workload.recipe import Recipe


class LearningRateScheduler:
    """Moves the learning rates of an optimizer's groups, each in proportion to its own.

    Args:
        optimizer: None for a stage that trains nothing.
        first_step: the first step that is made; the groups must still have their own rates.

    Raises:
        WorkloadError: the rate would end higher than every group's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, recipe: Recipe, first_step: int = 0) -> None:
        self._optimizer = optimizer
        self._scheduler: torch.optim.lr_scheduler.LambdaLR | None = None
        if optimizer is None or not recipe.changes_learning_rate:
            return
        own = [float(group["lr"]) for group in optimizer.param_groups]
        if recipe.min_learning_rate > max(own):
            raise WorkloadError(
                f"--min-learning-rate {recipe.min_learning_rate} is more than the optimizer's own learning "
                f"rate, {max(own)}",
                hint="give a smaller one, or a larger --learning-rate",
            )
        floors = [min(1.0, recipe.min_learning_rate / rate) if rate > 0 else 0.0 for rate in own]
        factors: list[Callable[[int], float]] = [
            partial(recipe.learning_rate_factor, floor=floor) for floor in floors
        ]
        if first_step:  # LambdaLR resumes from a step only where it is told the rates of the first
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors, last_epoch=first_step - 1)

    @property
    def learning_rate(self) -> float | None:
        """The first group's rate in the step that comes next; None for a stage that trains nothing."""
        if self._optimizer is None:
            return None
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """Sets the rates of the next step; called after each step of the optimizer."""
        if self._scheduler is not None:
            self._scheduler.step()
