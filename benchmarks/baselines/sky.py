"""Sky Computing's two-stage heuristic (``skyctl.paper.two_stage_heuristic``) as a baseline."""

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
from skyctl.errors import UndecidedError
from skyctl.paper import two_stage_heuristic
from skyctl.records.problem import Problem


def two_stages(problem: Problem, *, compare_next: bool = False) -> Assignment:
    """Every device keeps at least one layer, in inventory order."""
    times = [whole_s(problem, device.id) for device in problem.devices]
    try:
        cuts = two_stage_heuristic.two_stage_cuts(
            costs(problem), layer_bytes(problem), free_bytes(problem), times, compare_next=compare_next
        )
    except UndecidedError as exc:
        raise NotApplicableError(str(exc)) from exc
    assert all(a < b for a, b in itertools.pairwise(cuts))
    return assignment(problem, cuts)
