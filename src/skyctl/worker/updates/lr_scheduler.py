"""The learning rate of a stage's optimizer over the run: as the recipe says, or the user's own scheduler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from skyctl.errors import WorkloadError
from skyctl.workload.recipe import Recipe
from skyctl.workload.user_code import describe_exception

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler | None]


class LearningRateScheduler:
    """Moves the learning rates of an optimizer's groups.

    Make it while the optimizer is new, before it is restored from a checkpoint. The rates of a step depend on
    its number alone: the user's scheduler is stepped once for each step that was done before.

    Args:
        optimizer: None for a stage that trains nothing.
        recipe: moves all rates in the same proportion, where there is no scheduler of the user's.
        first_step: the first step that is made.
        make_own: gives the user's scheduler of the optimizer; None: there is none.

    Attributes:
        options: the options of the optimizer's groups that are moved, and so are not to be restored.

    Raises:
        WorkloadError: the rate would end higher than every group's own, or the user's scheduler failed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        recipe: Recipe,
        first_step: int = 0,
        make_own: MakeScheduler = lambda _optimizer: None,
    ) -> None:
        self._optimizer, self._step = optimizer, 0
        self._scheduler: LRScheduler | None = None
        self.options: frozenset[str] = frozenset()
        if optimizer is None:
            return
        before = [dict(group) for group in optimizer.param_groups]
        self._scheduler = make_own(optimizer)
        if self._scheduler is not None:
            with warnings.catch_warnings():  # that its optimizer has made no step: it made these before
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(first_step):
                    self.advance()
            groups = zip(optimizer.param_groups, before, strict=True)
            moved = {key for now, old in groups for key in now if now[key] is not old.get(key)}
            self.options = frozenset(moved | {"lr"})
        elif recipe.changes_learning_rate:
            self._scheduler = _scheduler_of_recipe(optimizer, recipe, first_step)
            self.options = frozenset({"lr"})
        self._step = first_step

    @property
    def learning_rate(self) -> float | None:
        """The first group's rate in the step that comes next; None for a stage that trains nothing."""
        if self._optimizer is None:
            return None
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """Sets the rates of the next step; called after each step of the optimizer.

        Raises:
            WorkloadError: the user's scheduler failed, or gives a rate that is no number.
        """
        self._step += 1
        if self._scheduler is None or self._optimizer is None:
            return
        try:
            self._scheduler.step()
        except Exception as exc:
            raise WorkloadError(
                f"the {type(self._scheduler).__name__} of lr_scheduler() gives no learning rate for step "
                f"{self._step + 1}: {describe_exception(exc)}",
                hint="lr_scheduler(optimizer, steps) is told how many steps the run has",
            ) from exc
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        if not all(map(math.isfinite, rates)):
            raise WorkloadError(
                f"the learning rates of step {self._step + 1} are {rates}, of which some are no number",
                hint="look at lr_scheduler()",
            )


def _scheduler_of_recipe(optimizer: torch.optim.Optimizer, recipe: Recipe, first_step: int) -> LambdaLR:
    """Warm-up, then constant, linear or cosine, each group in proportion to its own rate."""
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
    return LambdaLR(optimizer, factors, last_epoch=first_step - 1)
