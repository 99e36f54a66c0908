"""The optimal strategy: a good start, then the objective's own search; what it can't prove it bounds."""

from __future__ import annotations

import time

from skyctl.errors import UndecidedError
from skyctl.planner.bottleneck.solve import least_bottleneck
from skyctl.planner.evaluate import bottleneck_s, least_running
from skyctl.planner.found import NOTHING, Found
from skyctl.planner.heuristic.build import heuristic
from skyctl.planner.infeasible import raise_infeasible
from skyctl.planner.iteration.solve import least_iteration
from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]

SMALL = 2_000
"""Devices × layers up to which ``bottleneck`` starts from the heuristic's plan; for more it finds its own."""
LARGE = 200_000
"""Up to this, what is not proved is compared with the heuristic's plan; beyond, that takes seconds."""


def optimal(model: Model, time_limit_s: float) -> Found:
    """The best plan and its proof.

    Raises:
        InfeasibleError: proved that nothing fits.
        UndecidedError: out of time with no plan and no proof.
    """
    deadline = time.perf_counter() + time_limit_s
    if model.by_iteration:
        found = least_iteration(model, _start(model), deadline)
    else:
        found = _bottleneck(model, deadline)
    if found is None:
        raise UndecidedError(
            f"no plan was found within {time_limit_s:g} s, and it is not proved that there is none",
            hint="give --time-limit more seconds",
        )
    if not found.pieces:
        raise_infeasible(model, proved=True)
    return found


def _start(model: Model) -> Pieces | None:
    try:
        return heuristic(model)
    except UndecidedError:
        return None


def _bottleneck(model: Model, deadline: float) -> Found | None:
    size = model.devices * model.layers
    start = _start(model) if size <= SMALL else None
    best, bound, proved, method = least_bottleneck(model, start, deadline)
    if size > SMALL and not proved and (best is None or size <= LARGE):
        plans = [plan for plan in (best, _start(model)) if plan is not None]
        best = min(plans, key=lambda plan: bottleneck_s(model, plan), default=None)
    if best is None:
        return Found((), NOTHING, bound, bound, True, method) if proved else None
    return Found(best, least_running(model, best), bottleneck_s(model, best), bound, proved, method)
