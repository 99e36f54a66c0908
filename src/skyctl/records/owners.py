"""Owners of data: what they are called, and the local steps of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from skyctl.records.problem import Problem


def owner_names(owners: Sequence[Sequence[str]]) -> list[str]:
    """The owners' names, in scripts and figures: each one's nodes, with a plus between."""
    return ["+".join(nodes) for nodes in owners]


def local_steps_by_owner(problem: Problem) -> dict[str, int | Literal["auto"]]:
    """By owner, the local steps of a round that are asked for, as the rhythm has them.

    Empty where gradients are summed in every step. If data is nobody's alone there is one, called "".
    """
    steps, owners = problem.rhythm.local_steps, problem.owners
    if steps is None:
        return {}
    names = [""] if owners is None else owner_names(owners)
    return dict(zip(names, steps if isinstance(steps, tuple) else [steps] * len(names), strict=True))
