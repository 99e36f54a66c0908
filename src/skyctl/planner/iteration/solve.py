"""Objective ``iteration``: exact for few devices; for more, the best plan found and a bound."""

from __future__ import annotations

import itertools
import time

from skyctl.planner.bottleneck.solve import least_bottleneck
from skyctl.planner.evaluate import value_s
from skyctl.planner.found import Found
from skyctl.planner.iteration import relax
from skyctl.planner.iteration.best_first import BestFirst
from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]


def least_iteration(model: Model, start: Pieces | None, deadline: float) -> Found | None:
    """The best plan and its bound. ``start``: a plan to begin with.

    None: no plan was found; raises nothing. ``Found`` with no pieces: proved that there is none.
    """
    if start is not None and relax.can(model):
        return BestFirst(model, start, deadline).run()
    stop = time.perf_counter() + 0.5 * max(0.0, deadline - time.perf_counter())
    best, bound, proved, method = least_bottleneck(model, start, stop)
    if best is None:
        return Found((), (), float("inf"), float("inf"), True, method) if proved else None
    options = [(*value_s(model, pieces), pieces) for pieces in (start, best) if pieces is not None]
    value, flying, pieces = min(options, key=lambda option: option[0])
    step_bound = model.microbatches * bound + _least_optimizer_s(model)
    method = f"heuristic; bound: microbatches · bottleneck ({method})"
    return Found(pieces, flying, value, step_bound, False, method)


def _least_optimizer_s(model: Model) -> float:
    return min(b - a for sums in model.optimizer for a, b in itertools.pairwise(sums))
