"""The rings and stars of any replicas, with what a byte takes on each: for searches that look at many sets.

The best ring is found exactly for few replicas; of more, the nearest replica comes next, and single
changes improve on that.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skyctl.planner.routes.route_layouts import Layout
from skyctl.planner.sum_costs import SumCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_ORDERED = 9
"""Replicas up to which every order of a ring is looked at: 40,320 of nine."""
MOST_CHANGED = 32
"""Replicas up to which a ring's order is improved by single changes."""
MOST_ROUNDS = 6
SAME = 1e-12
"""Relative: a ring that is no faster than this is no other ring than one in the problem's order."""


class LayoutTerms(NamedTuple):
    """The layouts of some replicas. In each a sum of S bytes takes S · byte_s + latency_s by itself.

    Attributes:
        layouts: rings, then the stars at each replica, of those that ``sync`` leaves.
        byte_s, latency_s: by layout.
        least_ring: (byte_s, latency_s) that no ring is below where others than these might be faster; None:
            none is faster.
    """

    layouts: tuple[Layout, ...]
    byte_s: Floats
    latency_s: Floats
    least_ring: tuple[float, float] | None = None


class LayoutTable:
    """The rings and stars that a problem leaves to any replicas."""

    def __init__(self, costs: SumCosts) -> None:
        self._sync, self._total_bytes = costs.problem.sync, costs.total_bytes
        self._count, self._slots = len(costs.ids), costs.slots
        self._byte_s, self._latency_s, self._line_s = costs.byte_table, costs.latency_table, costs.line_table

    def terms(self, replicas: tuple[int, ...]) -> LayoutTerms:
        """The layouts that these replicas, ascending, may sum over: two replicas or more."""
        rings: list[tuple[int, ...]] = []
        byte_s, latency_s = np.zeros(0), np.zeros(0)
        least_ring = None
        if self._sync not in ("star", "server"):
            rings, byte_s, latency_s, least_ring = self._rings(np.array(replicas))
        layouts = [Layout(replicas, ring=() if ring == replicas else ring) for ring in rings]
        if self._sync != "ring":
            star_byte_s, star_latency_s = self._stars(np.array(replicas))
            layouts += [Layout(replicas, root) for root in replicas]
            byte_s, latency_s = np.append(byte_s, star_byte_s), np.append(latency_s, star_latency_s)
        return LayoutTerms(tuple(layouts), byte_s, latency_s, least_ring)

    def best_ring_byte_s(self, replicas: tuple[int, ...]) -> float:
        """Seconds a byte takes on the fastest ring that is known of two replicas or more."""
        return float(self._rings(np.array(replicas))[1].min())

    def _stars(self, replicas: Ints) -> tuple[Floats, Floats]:
        """By root, seconds a byte takes and seconds of latency."""
        at = np.ix_(replicas, replicas)
        byte_s, latency_s = self._byte_s[at], self._latency_s[at]
        star_s = np.maximum(byte_s.max(axis=0), byte_s.max(axis=1))
        if self._slots.slots:
            count = len(replicas)
            pairs = replicas[:, None] * self._count + replicas
            ways = np.stack([pairs, pairs.T])  # to the root of each column, and from it
            star_s = np.maximum(star_s, self._slots.busiest_s(ways, np.arange(count), 1.0, count))
        return star_s, latency_s.max(axis=0) + latency_s.max(axis=1)

    def _of_orders(self, orders: Ints) -> tuple[Floats, Floats]:
        """By ring (a row of devices), seconds a byte takes and seconds of latency."""
        rings, count = orders.shape
        after = np.roll(orders, -1, axis=1)
        byte_s = self._byte_s[orders, after].max(axis=1)
        if self._slots.slots:
            pairs = orders * self._count + after
            rows = np.arange(rings)[:, None]
            byte_s = np.maximum(byte_s, self._slots.busiest_s(pairs, rows, 1.0, rings))
        hops_s = self._latency_s[orders, after]
        # up to a root all hops but the one after it, down again all but the one before it
        latency_s = 2 * hops_s.sum(axis=1) - (hops_s + np.roll(hops_s, 1, axis=1)).min(axis=1)
        return byte_s * (2 * (count - 1) / count), latency_s

    def _rings(
        self, replicas: Ints
    ) -> tuple[list[tuple[int, ...]], Floats, Floats, tuple[float, float] | None]:
        """Rings of which none is slower than another both by byte and by latency; the problem's order first
        where no other is faster."""
        plain = replicas[None, :]
        byte_s, latency_s = self._of_orders(plain)
        bound = self._least_ring(replicas)
        if len(replicas) == 2 or (
            byte_s[0] <= bound[0] * (1 + SAME) and latency_s[0] <= bound[1] * (1 + SAME)
        ):
            return [tuple(replicas.tolist())], byte_s, latency_s, None
        few = len(replicas) <= MOST_ORDERED
        orders = (
            replicas[_all_orders(len(replicas))] if few else np.vstack([plain, self._good_orders(replicas)])
        )
        byte_s, latency_s = self._of_orders(orders)
        best = _fastest(byte_s, latency_s)
        rings = [tuple(order) for order in orders[best].tolist()]
        return rings, byte_s[best], latency_s[best], None if few else bound

    def _least_ring(self, replicas: Ints) -> tuple[float, float]:
        """(byte_s, latency_s) that no ring of these replicas is below: each uses one line out and one in."""
        count = len(replicas)
        at = np.ix_(replicas, replicas)
        apart = np.where(np.eye(count, dtype=bool), math.inf, 0.0)
        byte_s, latency_s = self._byte_s[at] + apart, self._latency_s[at] + apart
        line_s = max(byte_s.min(axis=1).max(), byte_s.min(axis=0).max())
        hops_s = max(latency_s.min(axis=1).sum(), latency_s.min(axis=0).sum())
        part = 2 * (count - 1) / count
        return float(part * line_s), float(part * hops_s)

    def _good_orders(self, replicas: Ints) -> Ints:
        """One ring, begun with the replica whose lines are the slowest: to the nearest, then changed."""
        away_s = self._away_s(replicas)
        order = [int(away_s.min(axis=1).argmax())]
        left = np.ones(len(replicas), dtype=bool)
        left[order[0]] = False
        while len(order) < len(replicas):
            order.append(int(np.where(left, away_s[order[-1]], math.inf).argmin()))
            left[order[-1]] = False
        best = np.array(order)
        best_s = float(self._sum_s(replicas[best[None, :]])[0])
        for _ in range(MOST_ROUNDS if len(order) <= MOST_CHANGED else 0):
            changed = best[_changes(len(order))]
            seconds = self._sum_s(replicas[changed])
            at = int(seconds.argmin())
            if seconds[at] >= best_s * (1 - SAME):
                break
            best, best_s = changed[at], seconds[at]
        at = int(best.argmin())
        ring: Ints = replicas[np.roll(best, -at)]
        return ring[None, :]

    def _away_s(self, replicas: Ints) -> Floats:
        """By pair of replicas, seconds of the whole sum over the line between them; to itself infinite."""
        pairs = replicas[:, None] * self._count + replicas
        out: Floats = self._line_s.take(pairs) * self._total_bytes + self._latency_s.take(pairs)
        np.fill_diagonal(out, math.inf)
        return out

    def _sum_s(self, orders: Ints) -> Floats:
        byte_s, latency_s = self._of_orders(orders)
        return byte_s * self._total_bytes + latency_s


@lru_cache(maxsize=16)
def _all_orders(count: int) -> Ints:
    """Every ring of so many replicas, beginning with the first: shape (orders, count), as they are first."""
    return np.array([(0, *rest) for rest in permutations(range(1, count))])


@lru_cache(maxsize=64)
def _changes(count: int) -> Ints:
    """A ring's order with a part of it turned around, or one replica elsewhere; shape (changes, count)."""
    out = []
    for i in range(count):
        for j in range(i + 2, count + 1):
            out.append([*range(i), *reversed(range(i, j)), *range(j, count)])
        rest = [x for x in range(count) if x != i]
        out += [[*rest[:j], i, *rest[j:]] for j in range(count) if j != i]
    return np.array(out)


def _fastest(byte_s: Floats, latency_s: Floats) -> Ints:
    """The rings than which none is as fast by byte and by latency; of equal ones the first."""
    byte_s, latency_s = _rounded(byte_s), _rounded(latency_s)
    kept: list[int] = []
    for k in np.lexsort((latency_s, byte_s)).tolist():
        if not kept or latency_s[k] < latency_s[kept[-1]]:
            kept.append(k)
    return np.array(kept)


def _rounded(seconds: Floats) -> Floats:
    """Without the last digits, so that sums in another order are no other sums."""
    largest = seconds.max()
    return np.round(seconds / largest, 12) if largest > 0 else seconds
