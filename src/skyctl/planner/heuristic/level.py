"""Cuts for a fixed order of devices: allocate by memory, then level the load (both phases of the heuristic).

Sky Computing (Zhu et al. 2022) fills devices by memory first and then hands layers from loaded stages to
idle neighbours. With the order fixed, "until the load is level" has an exact form: the smallest T for which
each stage, from the first on, can take as many layers as T and its memory allow, and all get placed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from skyctl.planner.model import Model, Piece

STEPS = 24


def fill(model: Model, order: Sequence[int], limit_s: float) -> tuple[Piece, ...] | None:
    """As many layers for each stage as memory and the limit allow, at least one; None: they do not all fit.

    The limit is the objective's: on the largest stage, or on each stage's and link's path through the step
    (fill, all microbatches, drain).
    """
    count = len(order)
    if count > model.layers or order[0] not in model.first or order[-1] not in model.last:
        return None
    m = model.microbatches if model.by_iteration else 1
    before = 0.0  # per microbatch: all earlier stages and boundaries, there and back
    start = 0
    pieces: list[Piece] = []
    for s, d in enumerate(order):
        if pieces and model.by_iteration:
            (ahead, there), (back, home) = (
                model.occupancy_s(pieces[-1].device, d, start),
                model.occupancy_s(d, pieces[-1].device, start),
            )
            if before + m * max(ahead, back) + there + home > limit_s:
                return None
            before += ahead + there + back + home
        most = model.layers - (count - s - 1)
        beside_s = model.handling[d] + model.neighbour[d] * ((s > 0) + (s < count - 1))
        budget_s = (limit_s - before) / m - 2 * beside_s * model.by_iteration
        stop = most if limit_s == math.inf else _most(model, d, start, most, budget_s)
        stop = _fitting(model, d, start, stop, model.flying(s, count))
        if stop <= start or (s == count - 1 and stop < model.layers):
            return None
        if model.by_iteration:
            before += model.busy_s(d, start, stop)
        pieces.append(Piece(d, start, stop))
        start = stop
    return tuple(pieces)


def _most(model: Model, device: int, start: int, most: int, budget_s: float) -> int:
    work = model.work[device]
    return min(most, bisect_right(work, work[start] + budget_s * (1 + 1e-12), start, most + 1) - 1)


def _fitting(model: Model, device: int, start: int, stop: int, flying: int) -> int:
    if stop <= start or model.fits(device, start, stop, flying):
        return stop
    low, high = start, stop  # low fits (nothing), high does not
    while high - low > 1:
        middle = (low + high) // 2
        if model.fits(device, start, middle, flying):
            low = middle
        else:
            high = middle
    return low


def estimate_s(model: Model, pieces: Sequence[Piece]) -> float:
    """The limit these pieces need in ``fill``."""
    if not model.by_iteration:
        return max(model.busy_s(*piece) for piece in pieces)
    m = model.microbatches
    before = 0.0
    out = 0.0
    for i, piece in enumerate(pieces):
        if i:
            a = pieces[i - 1].device
            (ahead, there), (back, home) = (
                model.occupancy_s(a, piece.device, piece.start),
                model.occupancy_s(piece.device, a, piece.start),
            )
            out = max(out, before + m * max(ahead, back) + there + home)
            before += ahead + there + back + home
        busy = model.busy_s(*piece)
        out = max(out, before + m * busy)
        before += busy
    return out


def level(
    model: Model, order: Sequence[int], below_s: float = math.inf
) -> tuple[float, tuple[Piece, ...]] | None:
    """(estimate, the levelled cuts) of an order, or None when nothing fits (or nothing below ``below_s``)."""
    pieces = fill(model, order, below_s * (1 - 1e-9) if below_s < math.inf else math.inf)
    if pieces is None:
        return None
    best = (estimate_s(model, pieces), pieces)
    low, high = 0.0, best[0]
    for _ in range(STEPS):
        middle = (low + high) / 2
        pieces = fill(model, order, middle)
        if pieces is None:
            low = middle
        else:
            cost = estimate_s(model, pieces)
            if cost < best[0]:
                best = (cost, pieces)
            high = min(middle, cost)
        if high - low <= 1e-6 * high:
            break
    return best
