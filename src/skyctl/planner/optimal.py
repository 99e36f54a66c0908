"""The optimal strategy: a good start, then the objective's own search; what it can't prove it bounds."""

from __future__ import annotations

import time

from skyctl.errors import UndecidedError
from skyctl.planner.bottleneck.solve import least_bottleneck
from skyctl.planner.evaluate import bottleneck_s, least_flying
from skyctl.planner.found import Found
from skyctl.planner.heuristic.build import heuristic
from skyctl.planner.infeasible import raise_infeasible
from skyctl.planner.iteration.solve import least_iteration
from skyctl.planner.model import Model, Piece

PLAYS = 500


def optimal(model: Model, time_limit_s: float) -> Found:
    """The best plan and its proof.

    Raises:
        InfeasibleError: proved that nothing fits.
        UndecidedError: out of time with no plan and no proof.
    """
    deadline = time.perf_counter() + time_limit_s
    try:
        start: tuple[Piece, ...] | None = heuristic(model, PLAYS if model.by_iteration else 150)
    except UndecidedError:
        start = None
    found = (
        least_iteration(model, start, deadline) if model.by_iteration else _bottleneck(model, start, deadline)
    )
    if found is None:
        raise UndecidedError(
            f"no plan was found within {time_limit_s:g} s, and it is not proved that there is none",
            hint="give --time-limit more seconds",
        )
    if not found.pieces:
        raise_infeasible(model, proved=True)
    return found


def _bottleneck(model: Model, start: tuple[Piece, ...] | None, deadline: float) -> Found | None:
    best, bound, proved, method = least_bottleneck(model, start, deadline)
    if best is None:
        return Found((), (), bound, bound, True, method) if proved else None
    return Found(best, least_flying(model, len(best)), bottleneck_s(model, best), bound, proved, method)
