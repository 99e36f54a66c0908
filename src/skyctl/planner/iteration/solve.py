"""Objective ``iteration``: exact for few devices; for more, the best plan found and a bound."""

from __future__ import annotations

import itertools
import time

from skyctl.planner.bottleneck.solve import least_bottleneck
from skyctl.planner.depths import value_s
from skyctl.planner.found import NOTHING, Found
from skyctl.planner.heuristic.anneal import improve
from skyctl.planner.iteration import relax, split, trip
from skyctl.planner.iteration.best_first import BestFirst
from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]
SEARCHED = 0.45
BOUNDED = 0.45
"""Shares of the time left for the search of a plan, and for the bound by trips."""
FEW_S = 2.0
"""Seconds after which the search for few devices finds nothing more."""
MARGIN = 1e-6
"""Relative: left off a bound, so that another hand can prove it in its own way."""
EXACT = 0.7
"""Share of the time for the exact search, where there is one, before bounds are sought otherwise."""


def least_iteration(model: Model, start: Pieces | None, deadline: float) -> Found | None:
    """The best plan and its bound. ``start``: a plan to begin with.

    None: no plan was found; raises nothing. ``Found`` with no pieces: proved that there is none.
    """
    if start is None:
        start, proved, method = _any_plan(model, deadline)
        if start is None:
            return Found((), NOTHING, float("inf"), float("inf"), True, method) if proved else None
    if not model.zero and relax.can(model, deadline - time.perf_counter()):
        found = BestFirst(model, start, _after(EXACT, deadline)).run()
        return found if found.proved else _tightened(model, found, deadline)
    stop = _after(SEARCHED, deadline)
    if model.zero and relax.can(model, deadline - time.perf_counter()):
        stop = min(stop, time.perf_counter() + FEW_S)
    pieces = improve(model, start, stop)
    value, running = value_s(model, pieces)
    return _tightened(model, Found(pieces, running, value, None, False, "local search"), deadline)


def _after(share: float, deadline: float) -> float:
    now = time.perf_counter()
    return now + share * max(0.0, deadline - now)


def _any_plan(model: Model, deadline: float) -> tuple[Pieces | None, bool, str]:
    best, _, proved, method = least_bottleneck(model, None, _after(SEARCHED, deadline))
    return best, proved and best is None, method


def _tightened(model: Model, found: Found, deadline: float) -> Found:
    """With the best of the bounds: its own, by trips, by the largest stage."""
    bounds = [(found.bound_s or 0.0, "")]
    stop = _after(BOUNDED, deadline)
    _, stage_s, _, method = least_bottleneck(model, found.pieces, stop)
    by_stage = model.microbatches * stage_s + _least_optimizer_s(model)
    bounds.append((min(by_stage, found.value_s), f"; bound: microbatches · bottleneck ({method})"))
    low = max(bound for bound, _ in bounds)
    by_trip = 0.0
    if model.zero:
        if relax.can(model, deadline - time.perf_counter()):
            by_paths = split.least_step_s(model) * (1 - MARGIN)
            bounds.append(
                (min(by_paths, found.value_s), "; bound: paths that weight gradients do not lengthen")
            )
    elif trip.can(model):
        by_trip = trip.TripBound(model, found.value_s).largest(low, found.value_s, deadline) * (1 - MARGIN)
    if by_trip > low:
        bounds.append((by_trip, "; bound: trips of a microbatch"))
    bound, words = max(bounds, key=lambda entry: entry[0])
    return Found(found.pieces, found.running, found.value_s, bound, False, found.method + words)


def _least_optimizer_s(model: Model) -> float:
    return min(b - a for sums in model.optimizer for a, b in itertools.pairwise(sums))
