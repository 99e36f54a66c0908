"""How many samples of a step each rank takes: as skyctl says, by ranks' speeds, else in equal parts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from skyctl.errors import InputError
from skyctl.schedule.batch_shares import proportional_shares

SHARES = "SKYCTL_SHARES"
"""The environment variable with all ranks' samples of a step, by rank, separated by commas."""
SPEEDS = "SKYCTL_SPEEDS"
"""The environment variable with all ranks' relative speeds, by rank, separated by commas."""

NumberT = TypeVar("NumberT", int, float)


class _Here:
    """The batch that this process's script has asked a share of."""

    batch: int | None = None


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks.

    Of the default process group once it is made, before that of the environment that ``torchrun`` and skyctl
    set; (0, 1) where there is neither.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def environment_shares() -> tuple[int, ...] | None:
    """All ranks' samples of a step as skyctl told them, by rank; None: it told none.

    Raises:
        InputError: they can't be read, or are not as many as there are ranks.
    """
    return _read_variable(SHARES, int, "shares", "whole numbers of at least 1")


def environment_speeds() -> tuple[float, ...] | None:
    """All ranks' relative speeds as skyctl told them, by rank; None: it knows none.

    Raises:
        InputError: they can't be read, or are not as many as there are ranks.
    """
    return _read_variable(SPEEDS, float, "speeds", "positive numbers")


def asked_batch() -> int | None:
    """The first ``total`` that this process has called ``share`` or ``shares`` with; None: it has not."""
    return _Here.batch


def _read_variable(
    variable: str, read: Callable[[str], NumberT], kind: str, needed: str
) -> tuple[NumberT, ...] | None:
    """A variable's number for each rank; None: it is not set. Raises InputError, as the callers say."""
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        numbers = tuple(read(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise InputError(
            f"{variable} is {text!r}; it needs {needed}, separated by commas",
            hint=f"let skyctl set it, or unset {variable} for equal shares",
        )
    _, world_size = rank_and_world_size()
    if len(numbers) != world_size:
        raise InputError(
            f"{variable} has the {kind} of {len(numbers)} ranks, but there are {world_size}",
            hint="start the script once per rank that skyctl was told of, "
            f"or unset {variable} for equal shares",
        )
    return numbers


def shares(total: int | None = None) -> tuple[int, ...]:
    """All ranks' samples of one step, by rank; at least 1 each.

    The first of these rules that applies gives them:

    1. skyctl's shares (``SKYCTL_SHARES``), where they add up to ``total`` or it is left out;
    2. ``total`` in proportion to the ranks' speeds (``SKYCTL_SPEEDS``), where skyctl knows them;
    3. ``total`` in proportion to skyctl's shares;
    4. equal parts of ``total``.

    Args:
        total: samples of a step over all ranks (the global batch). The shares add up to it.

    Raises:
        InputError: there are fewer samples than ranks, or neither ``total`` nor shares from skyctl.
    """
    shares_given = environment_shares()
    _, world_size = rank_and_world_size()
    if total is None:
        if shares_given is None:
            raise InputError(
                "skyctl has told this script no shares, and it names no batch to share",
                hint="say how many samples a step has over all ranks, as in share(64)",
            )
        return shares_given
    if total < world_size:
        raise InputError(
            f"a batch of {total} is too small for {world_size} ranks: each needs at least one sample",
            hint=f"use a batch of {world_size} or more, or fewer ranks",
        )
    _Here.batch = _Here.batch or total
    if shares_given is not None and sum(shares_given) == total:
        return shares_given
    return proportional_shares(total, environment_speeds() or shares_given or (1,) * world_size)


def share(total: int | None = None) -> int:
    """This rank's samples of one step: its entry of ``shares(total)``.

    Args:
        total: samples of a step over all ranks. Without it the share is skyctl's own.

    Raises:
        InputError: as for ``shares``.
    """
    rank, _ = rank_and_world_size()
    return shares(total)[rank]
