"""Sky Computing's two-stage heuristic (``skyctl.control.paper.twostage``) as a baseline: from a problem."""

from __future__ import annotations

import itertools

from baselines.common import (
    Assignment,
    NotApplicableError,
    assignment,
    costs,
    free_bytes,
    layer_bytes,
    whole_s,
)
from skyctl.control.paper import twostage
from skyctl.errors import UndecidedError
from skyctl.records.problem import Problem


def two_stages(problem: Problem, *, compare_next: bool = False) -> Assignment:
    """Every device keeps at least one layer, in inventory order."""
    times = [whole_s(problem, device.id) for device in problem.devices]
    try:
        cuts = twostage.two_stages(
            costs(problem), layer_bytes(problem), free_bytes(problem), times, compare_next=compare_next
        )
    except UndecidedError as exc:
        raise NotApplicableError(str(exc)) from exc
    assert all(a < b for a, b in itertools.pairwise(cuts))
    return assignment(problem, cuts)
