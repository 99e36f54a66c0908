"""Objective ``bottleneck``: the exact method that answers "is there a plan within a limit?", bisected."""

from __future__ import annotations

from skyctl.planner.bottleneck import subsets
from skyctl.planner.bottleneck.narrow import narrow
from skyctl.planner.model import Model, Piece
from skyctl.planner.solver import Solver

Pieces = tuple[Piece, ...]


def least_bottleneck(
    model: Model, start: Pieces | None, deadline: float
) -> tuple[Pieces | None, float, bool, str]:
    """(best plan, valid lower bound on any plan's largest stage, proved, method); links and order in time
    are ignored, memory and pins are not.

    ``start``: a plan to begin with. No plan and proved: there is none (the bound is then infinite).
    """
    by_subsets = subsets.can(model)
    solver = None if by_subsets else Solver(model, deadline)

    def cover(limit_s: float, strict: bool) -> Pieces | None:
        if solver is None:
            return subsets.cover(model, limit_s, strict=strict)
        return solver.cover(limit_s, strict)

    best, bound, proved = narrow(model, start, cover, deadline)
    method = "bisection over all subsets of devices" if by_subsets else "bisection, CP-SAT"
    return best, bound, proved, method
