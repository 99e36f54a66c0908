"""A lower bound on the step of several pipelines side by side, by prices of layers.

Every layer has a price, none negative. In a step of T seconds a device that holds layers [i, j) of a pipeline
with m microbatches takes m · (their prices) of all prices of all microbatches, M · Σ prices; what it can
take at most follows from the least step of each (i, j, m) (``StageCosts``). If all devices together take
less, there is no such step, whatever the prices are. The best prices for a T are the duals of pipelines in
fractions (Gilmore, Gomory 1961), found by cutting planes.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from skyctl.planner.hybrid.stage_costs import Floats, Ints, StageCosts
from skyctl.planner.linear_programs import TakenPrices
from skyctl.planner.link_tables import LinkTables
from skyctl.records.problem import Problem

CLOSE = 1e-4
"""Relative: how near the best prices' bound is approached."""
EPSILON = 1e-9
"""Relative to all prices: less is not trusted to be more than rounding."""
MOST_ROUNDS = 200


class HybridBound(NamedTuple):
    """``bound_s``: no two pipelines or more take fewer seconds; infinite: none fit. Proved by the prices."""

    bound_s: float
    layer_prices: tuple[float, ...]


def hybrid_bound(
    problem: Problem, deadline: float = math.inf, links: LinkTables | None = None
) -> HybridBound:
    """The bound on plans of two pipelines or more, with rings and stars, whatever the cuts and shares.

    Args:
        deadline: of ``time.perf_counter``; prices are improved until then at most.
        links: the problem's, where there are tables of them.
    """
    if len(problem.devices) < 2 or problem.microbatches < 2:
        return HybridBound(math.inf, (1.0,) * len(problem.layers))
    return _Search(StageCosts(problem, links), deadline).run()


class _Search:
    """Prices 0 = P_0 ≤ … ≤ P_L = 1 as sums from the first layer on, and what they refute."""

    def __init__(self, costs: StageCosts, deadline: float) -> None:
        self.costs = costs
        self.deadline = deadline
        self._cuts: set[tuple[int, int, float]] = set()

    def run(self) -> HybridBound:
        mean_s = np.diff(np.stack([self.costs.model.work_s[d] for d in range(self.costs.model.devices)]))
        best = _sums(mean_s.mean(axis=0))
        if (refuted := self._refuting(math.inf, best)) is not None:
            return _made(math.inf, refuted)
        low, high = self._most_refuted(best, 0.0, math.inf)
        high = math.inf
        step = 0.1
        while high - low > CLOSE * low and time.perf_counter() < self.deadline:
            middle = low * (1 + step) + (CLOSE if low <= 0 else 0.0)
            middle = middle if middle < high else (low + high) / 2
            refuting = self._refuting(middle, best)
            if refuting is None:
                high, step = middle, step / 4
            else:
                best = refuting
                low, _ = self._most_refuted(best, middle, high)
        return _made(low, best)

    def _takes(self, counts: Floats, prefix: Floats) -> tuple[float, Ints, Floats]:
        """(all devices' most together; by row, the range and how much it takes)."""
        worth = counts * (prefix[self.costs.stops] - prefix[self.costs.starts])
        dearest = worth.argmax(axis=1)
        takes = worth[np.arange(len(worth)), dearest]
        return float(takes @ self.costs.sizes), dearest, takes

    def _is_refuted(self, taken: float) -> bool:
        return taken < self.costs.microbatches * (1 - EPSILON)

    def _most_refuted(self, prefix: Floats, low: float, high: float) -> tuple[float, float]:
        """The largest limit that these prices refute, between one that they do and one that they don't."""
        if high == math.inf:
            high = max(low, float(self.costs.microbatch_s[:, -1].max()), 1e-12)
            while self._is_refuted(self._takes(self.costs.within(high), prefix)[0]):
                low, high = high, 2 * high
        while high - low > CLOSE / 8 * high:
            middle = (low + high) / 2
            if self._is_refuted(self._takes(self.costs.within(middle), prefix)[0]):
                low = middle
            else:
                high = middle
        return low, high

    def _refuting(self, limit_s: float, best: Floats) -> Floats | None:
        """Prices that refute a limit, near some that refute a smaller one; None: none do, or out of time."""
        counts = self.costs.within(limit_s)
        kept = [cut for cut in self._cuts if counts[cut[0], cut[1]] >= cut[2]]
        program = TakenPrices(self.costs.sizes, self.costs.starts, self.costs.stops, self.costs.layers)
        for cut in kept:
            program.add(cut)
        tried, most = best, math.inf
        for _ in range(MOST_ROUNDS):
            taken, ranges, takes = self._takes(counts, tried)
            if self._is_refuted(taken):
                return tried
            if taken < most:
                best, most = tried, taken
            for row in np.flatnonzero(takes > 0).tolist():
                cut = (row, int(ranges[row]), float(counts[row, ranges[row]]))
                self._cuts.add(cut)
                program.add(cut)
            solved = program.solve(self.deadline)
            if solved is None or not self._is_refuted(solved[0]):
                return None
            # half-way to the best so far: the program's own prices swing
            tried = (_sums(solved[1]) + best) / 2
        return None


def _sums(prices: Floats) -> Floats:
    """Prefix sums from 0 to 1 of prices, all equal where none is above 0."""
    prices = np.maximum(prices, 0.0)
    total = float(prices.sum())
    prices = prices / total if 0 < total < math.inf else np.full(len(prices), 1 / len(prices))
    return np.concatenate([[0.0], np.cumsum(prices)])


def _made(bound_s: float, prefix: Floats) -> HybridBound:
    return HybridBound(bound_s * (1 - EPSILON), tuple(map(float, np.diff(prefix))))
