"""Plans for any layers and many devices: built from the last layer backwards, the least wasteful kept.

A partial plan is how far down it reaches and which devices it has used; from the end, the number of stages
after one is known, and so is its memory. Waste: what the used devices could have taken (their share of the
layers' prices, ``layer_prices.py``) and did not. A partial plan that wastes more than there is to spare is
dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from skyctl.planner.bottleneck.layer_prices import EPSILON, LayerPrices, PriceShares
from skyctl.planner.bottleneck.reach_table import SUM_SLACK, Floats, Ints, ReachTable
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.evaluation import bottleneck_s

WIDTHS = (30, 150, 600, 2400)
POOL = 4
"""How many times the width of candidates are looked at."""
CLOSE = 1e-5
MAX_WORK = 4e8
"""Width × device classes × stages from which on a width is not tried."""


class BeamLevel(NamedTuple):
    """Partial plans of one number of stages: how far down, waste, devices used, and where from."""

    start: Ints
    waste: Floats
    used: Ints
    key: Ints
    parent: Ints
    row: Ints


class PricedBeam:
    """A beam search with given layer prices; ``prefix``: their prefix sums, 1 in all."""

    def __init__(self, prices: LayerPrices, prefix: Floats) -> None:
        self.prices, self.prefix = prices, prefix
        self.reach: ReachTable = prices.reach
        self.model: CostModel = prices.reach.model
        random = np.random.default_rng(0)
        self.classes = len(self.reach.members)
        self.mark = random.integers(1, 2**62, (self.classes, int(self.reach.sizes.max()) + 1))

    def find(self, limit_s: float, width: int) -> Placement | None:
        """A plan within the limit (but for rounding), or None: none was found."""
        reach, model = self.reach, self.model
        shares = self.prices.shares(self.prefix, limit_s)
        limit_s *= 1 + SUM_SLACK
        if shares.spare < -EPSILON:
            return None
        tables: dict[int, Ints] = {}
        levels = [self._nothing()]
        for stages in range(1, model.max_stages + 1):
            in_flight = model.least_in_flight(0, stages) if reach.staged else reach.in_flight
            low = tables.get(in_flight)
            if low is None:
                tables.clear()
                low = tables[in_flight] = reach.low(limit_s, in_flight)
            following = self._next(levels[-1], low, shares._replace(place=shares.place[stages - 1 :]), width)
            if following is None:
                return None
            levels.append(following)
            done = np.flatnonzero(following.start == 0)
            if len(done):
                return self._trace(levels, int(done[0]))
        return None

    def _nothing(self) -> BeamLevel:
        zero = np.zeros(1, dtype=np.int64)
        used = np.zeros((1, self.classes), dtype=np.int64)
        return BeamLevel(zero + self.reach.layers, np.zeros(1), used, zero, zero, zero)

    def _next(self, kept: BeamLevel, low: Ints, shares: PriceShares, width: int) -> BeamLevel | None:
        """The partial plans with one stage more, at the first of the places left."""
        start = low[:, kept.start].T  # [partial plan, class]
        took = self.prefix[kept.start][:, None] - self.prefix[start]
        waste = kept.waste[:, None] + shares.device + shares.place[0] - took
        open_ = (kept.used < self.reach.sizes) & (start < kept.start[:, None])
        parent, row = np.nonzero(open_ & (waste <= shares.spare + EPSILON))
        if not len(parent):
            return None
        start, waste = start[parent, row], waste[parent, row]
        key = kept.key[parent] ^ self.mark[row, kept.used[parent, row]]
        rank = np.where(start == 0, -1.0, waste)
        if len(rank) > POOL * width:
            some = np.argpartition(rank, POOL * width)[: POOL * width]
            parent, row, start, waste = parent[some], row[some], start[some], waste[some]
            key, rank = key[some], rank[some]
        order = np.argsort(rank, kind="stable")
        order = order[np.sort(np.unique(key[order], return_index=True)[1])]
        order = _spread(order, start[order], width)
        parent, row = parent[order], row[order]
        used = kept.used[parent]
        used[np.arange(len(row)), row] += 1
        return BeamLevel(start[order], waste[order], used, key[order], parent, row)

    def _trace(self, levels: list[BeamLevel], at: int) -> Placement | None:
        placement = []
        free = [list(group) for group in self.reach.members]
        for i in range(len(levels) - 1, 0, -1):
            level = levels[i]
            parent = int(level.parent[at])
            stop = int(levels[i - 1].start[parent])
            placement.append(StageAssignment(free[int(level.row[at])].pop(0), int(level.start[at]), stop))
            at = parent
        plan = tuple(placement)
        return plan if self.model.is_allowed(plan) else None


def _spread(order: Ints, start: Ints, width: int) -> Ints:
    """The first ``width``, but few that reach equally far down: devices that are nearly alike make many."""
    if len(order) <= width:
        return order
    by_start = np.argsort(start, kind="stable")
    same = start[by_start]
    number = np.arange(len(same)) - np.searchsorted(same, same, side="left")
    crowd = np.empty(len(same), dtype=np.int64)
    crowd[by_start] = number
    few = crowd < max(3, width // 10)
    return np.concatenate((order[few], order[~few]))[:width]


def search_beams(
    prices: LayerPrices, best: Placement | None, low_s: float, deadline: float, widths: Sequence[int] = WIDTHS
) -> Placement | None:
    """The best plan that beams of growing width find between ``low_s`` and ``best``."""
    reach = prices.reach
    model = reach.model
    if best is None:
        best = first_placement(prices, low_s, deadline)
        if best is None:
            return None
    high_s = bottleneck_s(model, best)
    beams = [PricedBeam(prices, prefix) for prefix in prices.prefixes[:-3:-1]]
    below = low_s
    for width in widths:
        if width * len(reach.members) * model.max_stages > MAX_WORK:
            break
        for beam in beams:
            low = below
            while high_s - low > CLOSE * high_s:
                if time.perf_counter() > deadline:
                    return best
                middle = (low + high_s) / 2
                placement = beam.find(middle, width)
                if placement is None:
                    low = middle
                else:
                    best, high_s = placement, min(high_s, bottleneck_s(model, placement))
            if high_s - low_s <= CLOSE * high_s:
                return best
        below = low_s + (high_s - low_s) * 0.5
    return best


def first_placement(prices: LayerPrices, low_s: float, deadline: float) -> Placement | None:
    """Any plan, within a few times ``low_s`` if it can be; a few tries however late it is."""
    limits = [low_s * (1 + 0.05 * 2**i) for i in range(10)]
    tries = [(limit_s, WIDTHS[0]) for limit_s in (*limits, math.inf)]
    tries += [(limit_s, width) for width in WIDTHS[1:3] for limit_s in (low_s * 1.5, low_s * 4, math.inf)]
    for i, (limit_s, width) in enumerate(tries):
        if (i % 3 or width > WIDTHS[0]) and time.perf_counter() > deadline:
            continue
        for prefix in reversed(prices.prefixes):
            placement = PricedBeam(prices, prefix).find(limit_s, width)
            if placement is not None:
                return placement
    return None
