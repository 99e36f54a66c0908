"""Lower bounds for any problem: every layer has a price, and a device can take only so much within a limit.

With prices π ≥ 0, device d within T holds at most y_d = the largest sum of prices of any range that its time
and memory allow; where Σ y_d < Σ π no plan keeps T. With π = work this is the volume bound, but one that
knows that layers are whole. The best prices are the duals of linear relaxations: of layers cut anywhere (few
constraints), or of ranges taken in fractions (Gilmore, Gomory 1961). Where memory depends on a stage's place,
so does what a device can take there, and no two stages have the same place: an assignment, whose dual says
what each device and each place can add.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from skyctl.planner.bottleneck.reach import Floats, Ints, Reach
from skyctl.planner.solver import fractional_prices, place_prices, range_prices

CLOSE = 1e-6
STEP = 1e-5
"""The best prices for a limit this much above what is refuted usually refute more: Newton's steps."""
MAX_CELLS = 120_000
MAX_ROWS = 40_000
MAX_PLACES = 20_000
EPSILON = 1e-9
"""Of all prices: less is not trusted to be more than rounding."""


def volume_bound_s(reach: Reach) -> float:
    """No plan's largest stage is below this: all layers shared out as if they could be cut anywhere.

    With weights y_d = 1 / (device d's time for everything): B · Σ y ≥ Σ over layers of min over d of
    y_d · time_d(layer), for any plan's bottleneck B.
    """
    wholes = reach.work[:, -1]
    if wholes.min() <= 0:
        return 0.0
    return float(_cheapest(reach).sum() / math.fsum(reach.sizes / wholes[reach.kind]) * (1 - 1e-9))


def _cheapest(reach: Reach) -> Floats:
    """Per layer the least share of its whole work that it is for any device."""
    least = np.full(reach.layers, np.inf)
    for work in reach.work:
        np.minimum(least, np.diff(work) / work[-1], out=least)
    return least


class Shares(NamedTuple):
    """What a device of each class, and a stage at each place from the end, can take at most, in prices: a
    stage takes no more than the sum of its two. ``spare``: all of that, less all layers."""

    device: Floats
    place: Floats
    spare: float


class Prices:
    """Prices tried so far, and whether they refute a limit."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self.known: list[Floats] = []
        self.cells = len(reach.members) * reach.layers
        self.by_place = reach.staged and len(reach.members) * reach.model.max_stages <= MAX_PLACES
        self._time: tuple[float, Ints] | None = None
        if reach.work[:, -1].min() > 0:
            self.add(_cheapest(reach))
        self.add(np.ones(reach.layers))
        if not reach.unlimited:
            sums = np.diff(np.array(reach.model.state) + reach.flying * np.array(reach.model.activation))
            self.add(sums)

    def add(self, prices: Floats) -> None:
        """More prices, one a layer."""
        if prices.sum() > 0:
            prefix = np.zeros(len(prices) + 1)
            np.cumsum(prices / prices.sum(), out=prefix[1:])
            self.known.append(prefix)

    def far(self, limit_s: float, flying: int | None = None) -> Ints:
        """``Reach.far``, with the least number in flight where none is given."""
        if self._time is None or self._time[0] != limit_s:
            starts = np.arange(self.reach.layers + 1)
            self._time = (limit_s, self.reach.time_far(limit_s * (1 + 1e-10), starts)[self.reach.kind])
        return self.reach.within(self._time[1], self.reach.flying if flying is None else flying)

    def most(self, prefix: Floats, limit_s: float, flying: int | None = None) -> Floats:
        """Per class the most that one of its devices can take."""
        far = self.far(limit_s, flying)
        return np.array([np.max(prefix[stops] - prefix) for stops in far])

    def shares(self, prefix: Floats, limit_s: float) -> Shares:
        """What devices and places can take: by their places, where memory depends on them."""
        model, sizes = self.reach.model, self.reach.sizes
        device = self.most(prefix, limit_s)
        place = np.zeros(model.max_stages)
        spare = float(device @ sizes) - 1
        if self.by_place and spare > -EPSILON:
            flying = [model.flying(0, stages) for stages in range(1, model.max_stages + 1)]
            rows = {k: self.most(prefix, limit_s, k) for k in sorted(set(flying))}
            takes = np.stack([rows[k] for k in flying], axis=1)
            found = place_prices(takes, sizes.tolist())
            if found is not None:
                apart = np.maximum(0.0, (takes - found).max(axis=1))
                if float(apart @ sizes) + float(found.sum()) - 1 < spare:
                    device, place = apart, found
                    spare = float(apart @ sizes) + float(found.sum()) - 1
        return Shares(device, place, spare)

    def refute(self, limit_s: float, *, by_place: bool = False) -> bool:
        """Whether known prices show that no plan keeps the limit."""
        for i in range(len(self.known) - 1, -1, -1):
            prefix = self.known[i]
            if by_place:
                spare = self.shares(prefix, limit_s).spare
            else:
                spare = float(self.most(prefix, limit_s) @ self.reach.sizes) - 1
            if spare < -EPSILON:
                self.known.append(self.known.pop(i))
                return True
        return False


def price_bound_s(prices: Prices, low_s: float, high_s: float, deadline: float) -> tuple[float, str]:
    """(the largest limit between two that is refuted, how); no plan keeps ``low_s`` already.

    ``high_s``: a plan's value, or infinite where none is known: the bound is infinite where there is none.
    The prices that show it are ``prices.known[-1]`` then.
    """
    if high_s == math.inf:
        how = _nothing_fits(prices, deadline)
        if how:
            return math.inf, how
        high_s = float(prices.reach.work[:, -1].max()) * (1 + 1e-9)
    low, kind = _bisect(prices, (low_s, high_s), deadline), "prices"
    if low == low_s:
        kind = "volume"
    if prices.by_place:
        # Tables for every place cost much: a third of the time for them.
        now = time.perf_counter()
        between = _improved(prices, (low, high_s), now + (deadline - now) * 0.5)
        low = _bisect(prices, (between, high_s), deadline, by_place=True)
        return low, "prices by place" if low > between else "prices"
    if high_s - low > CLOSE * high_s and time.perf_counter() < deadline:
        low, kind = _improved(prices, (low, high_s), deadline), "prices"
    return low, kind


def _nothing_fits(prices: Prices, deadline: float) -> str:
    """What proves that no plan fits in memory, whatever it takes; empty: nothing does."""
    if prices.refute(math.inf):
        return "prices"
    if prices.reach.unlimited:
        return ""
    far = prices.far(math.inf)
    if _rows(far) <= MAX_ROWS:
        found = range_prices(prices.reach, far, deadline)
        if found is not None:
            prices.add(found)
    if prices.refute(math.inf):
        return "prices"
    return "prices by place" if prices.by_place and prices.refute(math.inf, by_place=True) else ""


def _improved(prices: Prices, between: tuple[float, float], deadline: float) -> float:
    """The largest limit refuted, by better and better prices."""
    reach = prices.reach
    low, high = between
    related = len(reach.work) == 1 or not reach.model.problem.times
    if prices.cells <= MAX_CELLS and not (related and reach.unlimited):
        found = fractional_prices(reach, deadline)
        if found is not None:
            prices.add(found)
            low = _bisect(prices, (low, high), deadline)
    while low < high and _rows(prices.far(low * (1 + STEP))) <= MAX_ROWS:
        found = range_prices(reach, prices.far(low * (1 + STEP)), deadline)
        if found is None:
            break
        prices.add(found)
        if not prices.refute(low * (1 + STEP)):
            prices.known.pop()
            break
        low = _bisect(prices, (low * (1 + STEP), high), deadline)
    return low


def _rows(far: Ints) -> int:
    """How many largest ranges there are."""
    return int(np.count_nonzero(far[:, 1:] > far[:, :-1])) + len(far)


def _bisect(
    prices: Prices, between: tuple[float, float], deadline: float, *, by_place: bool = False
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
