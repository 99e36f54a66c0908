"""The optimizer and the learning-rate scheduler of some parameters: the user's, or AdamW and none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skyctl.errors import WorkloadError
from skyctl.workload import user_code
from skyctl.workload.layered_model import LayeredModel
from skyctl.workload.parameter_names import with_names
from skyctl.workload.recipe import Recipe

EMPTY_HINT = (
    "each stage calls it with its own parameters: a list that it picks from them may be empty there, which "
    "torch refuses; a group, {'params': [...]}, may be empty"
)


def make_default_optimizer(
    wanted: Sequence[nn.Parameter], rate: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """AdamW over those parameters; an optimizer that does nothing where there are none."""
    if not wanted:
        return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
    fused = all(p.device.type != "meta" and p.is_floating_point() for p in wanted)
    return torch.optim.AdamW(wanted, lr=rate, betas=betas, fused=fused or None)


def make_users_optimizer(
    model: LayeredModel, wanted: Sequence[nn.Parameter], learning_rate: float | None
) -> torch.optim.Optimizer:
    """The user's optimizer over those parameters, of which there are some.

    Args:
        learning_rate: of all its groups, whatever they have; None: their own.

    Raises:
        WorkloadError: the user's optimizer() raised, or gave something else than an optimizer whose
            ``step()`` takes no argument: LBFGS computes the loss anew within a step.
    """
    try:
        with user_code.user_errors(model.path or Path(), "optimizer()"):
            optimizer = model.functions["optimizer"](list(wanted), with_names(wanted))
    except WorkloadError as exc:
        if exc.hint is None and isinstance(exc.__cause__, ValueError | IndexError):
            exc.hint = EMPTY_HINT
        raise
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(f"{model.source_name}: optimizer() must give a torch optimizer, not {kind}")
    if needed := _needed_by_step(optimizer):
        raise WorkloadError(
            f"{model.place_of('optimizer')}: {kind}'s step() needs {needed}: it computes "
            "the loss several times a step, and no stage of a pipeline can do that alone",
            hint="give an optimizer whose step() takes no argument, such as AdamW or SGD",
        )
    _refuse_other_tensors(optimizer, wanted, model)
    if learning_rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    return optimizer


def _refuse_other_tensors(
    optimizer: torch.optim.Optimizer, wanted: Sequence[nn.Parameter], model: LayeredModel
) -> None:
    """Raises WorkloadError if the optimizer has tensors that it was not given: nothing would be trained."""
    given = {id(parameter) for parameter in wanted}
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    others = sum(id(tensor) not in given for tensor in held)
    if others:
        raise WorkloadError(
            f"{model.place_of('optimizer')}: optimizer() gives a {type(optimizer).__name__} of {len(held)} "
            f"tensors, {others} of which it was not given",
            hint="make it of its argument, def optimizer(parameters): return SGD(parameters, …): each "
            "machine builds its own layers, and gives it their parameters",
        )


def make_users_lr_scheduler(
    model: LayeredModel, optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The user's scheduler of that optimizer in a run of so many steps; None: the file defines none.

    Raises:
        WorkloadError: the user's lr_scheduler() raised, gave something else than a scheduler of that
            optimizer whose ``step()`` takes no argument, or the recipe moves the rates as well.
    """
    if "lr_scheduler" not in model.functions:
        return None
    _refuse_two_schedules(recipe, model.source_name)
    with user_code.user_errors(model.path or Path(), "lr_scheduler()"):
        scheduler = model.functions["lr_scheduler"](optimizer, steps)
    kind = type(scheduler).__name__
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise WorkloadError(
            f"{model.source_name}: lr_scheduler() must give a scheduler of torch.optim, not {kind}"
        )
    if needed := _needed_by_step(scheduler):
        raise WorkloadError(
            f"{model.source_name}: {kind}'s step() needs {needed}: it follows what was measured, and every "
            "stage must have the same rate, before and after a resume, from the step's number alone",
            hint="give a scheduler whose step() takes no argument, such as CosineAnnealingLR or OneCycleLR",
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise WorkloadError(
            f"{model.source_name}: lr_scheduler() gave a {kind} of another optimizer than it was given"
        )
    return scheduler


def check_lr_scheduler(
    model: LayeredModel, recipe: Recipe, make_optimizer: Callable[[], torch.optim.Optimizer]
) -> None:
    """Checks the user's ``lr_scheduler``, if there is one, where nothing is trained.

    Args:
        make_optimizer: makes one over the whole model's parameters, which have no values.

    Raises:
        WorkloadError: as ``make_users_lr_scheduler``.
    """
    if "lr_scheduler" not in model.functions:
        return
    _refuse_two_schedules(recipe, model.source_name)
    try:
        optimizer = make_optimizer()
    except WorkloadError:  # one that looks at values can be made on the nodes only
        return
    make_users_lr_scheduler(model, optimizer, recipe, recipe.total_steps)


def _refuse_two_schedules(recipe: Recipe, source_name: str) -> None:
    """Raises WorkloadError where the recipe moves the learning rate that ``lr_scheduler()`` moves."""
    given = [f"--lr-schedule {recipe.lr_schedule}"] if recipe.lr_schedule != "constant" else []
    given += [f"--warmup-steps {recipe.warmup_steps}"] if recipe.warmup_steps else []
    if given:
        raise WorkloadError(
            f"{source_name} defines lr_scheduler(), and {' and '.join(given)} would move the same rates",
            hint=f"leave {' and '.join(given)} out, or take lr_scheduler() out of the file",
        )


def _needed_by_step(steps: Any) -> str:
    """The parameters that ``step()`` can't do without, with commas between."""
    parameters = inspect.signature(steps.step).parameters.values()
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(p.name for p in parameters if p.default is p.empty and p.kind not in rest)
