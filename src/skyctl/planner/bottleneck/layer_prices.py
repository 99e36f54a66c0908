"""Lower bounds for any problem: every layer has a price, and a device can take only so much within a limit.

With prices π ≥ 0, device d within T holds at most y_d = the largest sum of prices of any range that its time
and memory allow; where Σ y_d < Σ π no plan keeps T. With π = work this is the volume bound, but one that
knows that layers are whole. The best prices are the duals of linear relaxations: of layers cut anywhere (few
constraints), or of ranges taken in fractions (Gilmore, Gomory 1961). If memory depends on a stage's place, so
does what a device can take there. No two stages have the same place: that is an assignment, whose dual says
what each device and each place can add.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from skyctl.planner.bottleneck.reach_table import Floats, Ints, ReachTable
from skyctl.planner.evaluation import BoundKind
from skyctl.planner.linear_programs import fractional_prices, position_prices, range_prices
from skyctl.records.plan import Witness

CLOSE = 1e-6
STEP = 1e-5
"""The best prices for a limit this much above what is refuted usually refute more: Newton's steps."""
MAX_CELLS = 120_000
MAX_ROWS = 40_000
MAX_PLACES = 20_000
EPSILON = 1e-9
"""Relative to the sum of all prices: less is not trusted to be more than rounding."""


def volume_bound_s(reach: ReachTable) -> float:
    """No plan's largest stage is below this: all layers shared out as if they could be cut anywhere.

    With weights y_d = 1 / (device d's time for everything): B · Σ y ≥ Σ over layers of min over d of
    y_d · time_d(layer), for any plan's bottleneck B.
    """
    wholes = reach.work[:, -1]
    if wholes.min() <= 0:
        return 0.0
    return float(_cheapest(reach).sum() / math.fsum(reach.sizes / wholes[reach.timing]) * (1 - 1e-9))


def _cheapest(reach: ReachTable) -> Floats:
    """By layer, the least share of a device's whole work that it is on any device."""
    least = np.full(reach.layers, np.inf)
    for work in reach.work:
        np.minimum(least, np.diff(work) / work[-1], out=least)
    return least


class PriceShares(NamedTuple):
    """The most that a device of each class, and a stage at each place from the end, can take, in prices.
    A stage takes no more than the sum of its two. ``spare``: all of that, less all layers."""

    device: Floats
    place: Floats
    spare: float


class LayerPrices:
    """Layer prices tried so far, as prefix sums from 0 to 1, and whether they refute a limit."""

    def __init__(self, reach: ReachTable) -> None:
        self.reach = reach
        self.prefixes: list[Floats] = []
        self.cells = len(reach.members) * reach.layers
        self.by_place = reach.staged and len(reach.members) * reach.model.max_stages <= MAX_PLACES
        self._time: tuple[float, Ints] | None = None
        if reach.work[:, -1].min() > 0:
            self.add(_cheapest(reach))
        self.add(np.ones(reach.layers))
        if not reach.unlimited:
            sums = np.diff(
                np.array(reach.model.state_bytes) + reach.in_flight * np.array(reach.model.activation_bytes)
            )
            self.add(sums)

    def add(self, prices: Floats) -> None:
        """Adds prices, one per layer."""
        if prices.sum() > 0:
            prefix = np.zeros(len(prices) + 1)
            np.cumsum(prices / prices.sum(), out=prefix[1:])
            self.prefixes.append(prefix)

    def far(self, limit_s: float, in_flight: int | None = None) -> Ints:
        """``ReachTable.far``, with the least number in flight where none is given."""
        if self._time is None or self._time[0] != limit_s:
            starts = np.arange(self.reach.layers + 1)
            self._time = (limit_s, self.reach.time_far(limit_s * (1 + 1e-10), starts)[self.reach.timing])
        return self.reach.within(self._time[1], self.reach.in_flight if in_flight is None else in_flight)

    def most(self, prefix: Floats, limit_s: float, in_flight: int | None = None) -> Floats:
        """By class, the most (in prices) that one of its devices can take within the limit."""
        far = self.far(limit_s, in_flight)
        return np.array([np.max(prefix[stops] - prefix) for stops in far])

    def shares(self, prefix: Floats, limit_s: float) -> PriceShares:
        """The most that devices and places can take: by their places, if memory depends on them."""
        model, sizes = self.reach.model, self.reach.sizes
        device = self.most(prefix, limit_s)
        place = np.zeros(model.max_stages)
        spare = float(device @ sizes) - 1
        if self.by_place and spare > -EPSILON:
            in_flight = [model.least_in_flight(0, stages) for stages in range(1, model.max_stages + 1)]
            rows = {k: self.most(prefix, limit_s, k) for k in sorted(set(in_flight))}
            takes = np.stack([rows[k] for k in in_flight], axis=1)
            by_position = position_prices(takes, sizes.tolist())
            if by_position is not None:
                apart = np.maximum(0.0, (takes - by_position).max(axis=1))
                if float(apart @ sizes) + float(by_position.sum()) - 1 < spare:
                    device, place = apart, by_position
                    spare = float(apart @ sizes) + float(by_position.sum()) - 1
        return PriceShares(device, place, spare)

    def witness(self, limit_s: float) -> Witness | None:
        """The known prices that refute the limit, as a certificate keeps them; None where none do."""
        by_place = False
        if not self.refute(limit_s):
            by_place = self.by_place and self.refute(limit_s, by_place=True)
            if not by_place:
                return None
        prefix = self.prefixes[-1]
        place = self.shares(prefix, limit_s).place if by_place else ()
        return Witness(
            layer_prices=tuple(map(float, np.diff(prefix))),
            place_prices=tuple(max(0.0, float(price)) for price in place),
        )

    def refute(self, limit_s: float, *, by_place: bool = False) -> bool:
        """Whether known prices show that no plan keeps the limit."""
        for i in range(len(self.prefixes) - 1, -1, -1):
            prefix = self.prefixes[i]
            if by_place:
                spare = self.shares(prefix, limit_s).spare
            else:
                spare = float(self.most(prefix, limit_s) @ self.reach.sizes) - 1
            if spare < -EPSILON:
                self.prefixes.append(self.prefixes.pop(i))
                return True
        return False


def price_bound_s(
    prices: LayerPrices, low_s: float, high_s: float, deadline: float
) -> tuple[float, BoundKind]:
    """(the largest limit between two that is refuted, how); no plan keeps ``low_s`` already.

    ``high_s``: a plan's value, or infinite where none is known: the bound is infinite where there is none.
    The prices that show it are ``prices.prefixes[-1]`` then.
    """
    if high_s == math.inf:
        kind_of_proof = _nothing_fits(prices, deadline)
        if kind_of_proof is not None:
            return math.inf, kind_of_proof
        high_s = float(prices.reach.work[:, -1].max()) * (1 + 1e-9)
    low = _bisect(prices, (low_s, high_s), deadline)
    kind = BoundKind.VOLUME if low == low_s else BoundKind.PRICES
    if prices.by_place:
        # Tables for every place cost much: a third of the time for them.
        now = time.perf_counter()
        between = _improved(prices, (low, high_s), now + (deadline - now) * 0.5)
        low = _bisect(prices, (between, high_s), deadline, by_place=True)
        return low, BoundKind.PRICES_BY_PLACE if low > between else BoundKind.PRICES
    if high_s - low > CLOSE * high_s and time.perf_counter() < deadline:
        low, kind = _improved(prices, (low, high_s), deadline), BoundKind.PRICES
    return low, kind


def _nothing_fits(prices: LayerPrices, deadline: float) -> BoundKind | None:
    """The bound that proves that no plan fits in memory, however long it takes; None: none does."""
    if prices.refute(math.inf):
        return BoundKind.PRICES
    if prices.reach.unlimited:
        return None
    far = prices.far(math.inf)
    if _rows(far) <= MAX_ROWS:
        better = range_prices(prices.reach.sizes.tolist(), far, deadline)
        if better is not None:
            prices.add(better)
    if prices.refute(math.inf):
        return BoundKind.PRICES
    by_place = prices.by_place and prices.refute(math.inf, by_place=True)
    return BoundKind.PRICES_BY_PLACE if by_place else None


def _improved(prices: LayerPrices, between: tuple[float, float], deadline: float) -> float:
    """The largest limit refuted between two, by better and better prices."""
    reach = prices.reach
    low, high = between
    related = len(reach.work) == 1 or not reach.model.problem.times
    if prices.cells <= MAX_CELLS and not (related and reach.unlimited):
        needs = np.diff(
            np.array(reach.model.state_bytes) + reach.in_flight * np.array(reach.model.activation_bytes)
        )
        classes = zip(reach.sizes.tolist(), reach.timing.tolist(), reach.available.tolist(), strict=True)
        better = fractional_prices(np.diff(reach.work, axis=1), needs, list(classes), deadline)
        if better is not None:
            prices.add(better)
            low = _bisect(prices, (low, high), deadline)
    while low < high and _rows(prices.far(low * (1 + STEP))) <= MAX_ROWS:
        better = range_prices(reach.sizes.tolist(), prices.far(low * (1 + STEP)), deadline)
        if better is None:
            break
        prices.add(better)
        if not prices.refute(low * (1 + STEP)):
            prices.prefixes.pop()
            break
        low = _bisect(prices, (low * (1 + STEP), high), deadline)
    return low


def _rows(far: Ints) -> int:
    """How many largest ranges there are, the rows of the linear program."""
    return int(np.count_nonzero(far[:, 1:] > far[:, :-1])) + len(far)


def _bisect(
    prices: LayerPrices, between: tuple[float, float], deadline: float, *, by_place: bool = False
) -> float:
    """The largest limit refuted; the lower one of ``between`` already is."""
    low, high = between
    while high - low > CLOSE * high and time.perf_counter() < deadline:
        middle = (low + high) / 2
        if prices.refute(middle, by_place=by_place):
            low = middle
        else:
            high = middle
    return low
