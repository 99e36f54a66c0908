"""Cuts for a fixed order of devices: the load balanced within memory, or the same number of layers for all.

Sky Computing (Zhu et al. 2022) fills devices by memory first and then hands layers from loaded stages to
idle neighbours. With the order fixed, "until the load is balanced" has an exact form: the smallest T for
which each stage, from the first on, can take as many layers as T and its memory allow, and all get placed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from skyctl.planner.cost_model import CostModel, Placement, StageAssignment, consecutive

BISECTIONS = 24


def fill_in_order(model: CostModel, order: Sequence[int], limit_s: float) -> Placement | None:
    """As many layers for each stage as memory and the limit allow, at least one; None: they do not all fit.

    The limit is the objective's: on the largest stage, or on each stage's and link's path through the step
    (fill, all microbatches, drain).
    """
    count = len(order)
    if count > model.layers or order[0] not in model.may_be_first or order[-1] not in model.may_be_last:
        return None
    m = model.microbatches if model.by_iteration else 1
    before = 0.0  # per microbatch: all earlier stages and boundaries, there and back
    start = 0
    stages: list[StageAssignment] = []
    for s, d in enumerate(order):
        if stages and model.by_iteration:
            ahead, ahead_latency = model.occupancy_s(stages[-1].device, d, start)
            back, back_latency = model.occupancy_s(d, stages[-1].device, start)
            if before + m * max(ahead, back) + ahead_latency + back_latency > limit_s:
                return None
            before += ahead + ahead_latency + back + back_latency
        most = model.layers - (count - s - 1)
        overhead_s = model.overhead_s[d] + model.neighbour_overhead_s[d] * ((s > 0) + (s < count - 1))
        budget_s = (limit_s - before) / m - 2 * overhead_s * model.by_iteration
        stop = most if limit_s == math.inf else _most_within(model, d, start, most, budget_s)
        stop = _most_fitting(model, d, start, stop, model.least_in_flight(s, count))
        if stop <= start or (s == count - 1 and stop < model.layers):
            return None
        if model.by_iteration:
            before += model.busy_s(d, start, stop)
        stages.append(StageAssignment(d, start, stop))
        start = stop
    return tuple(stages)


def _most_within(model: CostModel, device: int, start: int, most: int, budget_s: float) -> int:
    work = model.work_s[device]
    return min(most, bisect_right(work, work[start] + budget_s * (1 + 1e-12), start, most + 1) - 1)


def _most_fitting(model: CostModel, device: int, start: int, stop: int, in_flight: int) -> int:
    if stop <= start or model.fits(device, start, stop, in_flight):
        return stop
    low, high = start, stop  # low fits (nothing), high does not
    while high - low > 1:
        middle = (low + high) // 2
        if model.fits(device, start, middle, in_flight):
            low = middle
        else:
            high = middle
    return low


def estimate_s(model: CostModel, placement: Placement) -> float:
    """The least limit for which ``fill_in_order`` could give this placement, in seconds."""
    if not model.by_iteration:
        return max(model.busy_s(*stage) for stage in placement)
    m = model.microbatches
    before = 0.0
    out = 0.0
    for i, stage in enumerate(placement):
        if i:
            a = placement[i - 1].device
            ahead, ahead_latency = model.occupancy_s(a, stage.device, stage.start)
            back, back_latency = model.occupancy_s(stage.device, a, stage.start)
            out = max(out, before + m * max(ahead, back) + ahead_latency + back_latency)
            before += ahead + ahead_latency + back + back_latency
        busy = model.busy_s(*stage)
        out = max(out, before + m * busy)
        before += busy
    return out


def balance_layers(model: CostModel, order: Sequence[int]) -> tuple[float, Placement] | None:
    """(estimate in seconds, balanced cuts) of an order; None: nothing fits."""
    placement = fill_in_order(model, order, math.inf)
    if placement is None:
        return None
    best = (estimate_s(model, placement), placement)
    low, high = 0.0, best[0]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        placement = fill_in_order(model, order, middle)
        if placement is None:
            low = middle
        else:
            cost = estimate_s(model, placement)
            if cost < best[0]:
                best = (cost, placement)
            high = min(middle, cost)
        if high - low <= 1e-6 * high:
            break
    return best


def even_placement(model: CostModel) -> Placement:
    """The same number of layers for every device, the baseline that needs no measurement; it may not fit.

    Devices are taken in inventory order; the first ones get one layer more where it does not divide, and with
    more devices than layers the last ones stay unused.
    """
    share, more = divmod(model.layers, model.devices)
    return consecutive((d, share + (d < more)) for d in range(model.max_stages))


def near_neighbours(model: CostModel, fast: Sequence[int]) -> list[int]:
    """From the first of these devices on, always the one that is nearest for a message of mean size."""
    size = sum(model.output_bytes) / model.layers
    chain, rest = [fast[0]], list(fast[1:])
    while rest:
        at = chain[-1]

        def away_s(d: int, at: int = at) -> float:
            link = model.link_cost(at, d)
            return link.latency_s + size * link.slowest_s_per_byte

        chain.append(min(rest, key=away_s))
        rest.remove(chain[-1])
    return chain
