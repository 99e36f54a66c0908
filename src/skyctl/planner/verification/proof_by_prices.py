"""A bound for any problem: a price π ≥ 0 a layer, and what a device can hold is worth Σ π.

Device d holds at most y_d = the largest Σ π over the ranges it can take below the limit. Where Σ y_d over
the devices is less than Σ π over the layers, no plan is below the limit. With π = a device's times this is
the volume bound, but it knows that layers are whole; with state bytes it is one on memory. Prices are tried
from a list, and then improved: a layer that the devices' best ranges cover more than once gets cheaper, one
that they leave out dearer (the subgradient method with Polyak's step, 1969).

Memory is taken with the least number in flight that any place has, and without the receive window.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from skyctl.planner.verification import convex_solvers
from skyctl.planner.verification.problem_data import Array, Bools, Ints, ProblemData, Proof, sums

MAX_LAYER_PRICE_CELLS = 6e8
"""Device kinds × layers × evaluations of a price: about ten seconds."""
MAX_STEPS = 6_000
LAYER_PRICE_MARGIN = 1e-11
"""Relative; how far Σ y must stay below Σ π, for sums round."""
BLOCK = 1 << 21
"""Cells of a table of ranges looked at at a time."""


@dataclass(frozen=True)
class HoldableRanges:
    """Per kind of device its number, and its ranges: ``far[k, start]`` is the last boundary."""

    count: Array
    far: np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def listed(facts: ProblemData, below_s: float) -> Proof:
    """``prove`` with the prices of the list alone: quick."""
    return prove_by_layer_prices(facts, below_s, improve=False)


def prove_by_layer_prices(facts: ProblemData, below_s: float, *, improve: bool = True) -> Proof:
    """Whether no plan's stages all take less than ``below_s``: proved, or not known."""
    search = _LayerPriceSearch(facts, _ranges(facts, below_s))
    for name, price in _candidates(facts):
        ratio = search.ratio(price)
        if ratio < 1 - LAYER_PRICE_MARGIN:
            return Proof(True, _words(ratio, name))
    ratio = search.improve() if improve else search.best[0]
    if ratio < 1 - LAYER_PRICE_MARGIN:
        return Proof(True, _words(ratio, "a price per layer"))
    return Proof(
        None, f"the devices hold up to {ratio:.4%} of the layers' price below it, at the best prices found"
    )


def _words(ratio: float, name: str) -> str:
    return f"below it, all devices hold at most {ratio:.6%} of the layers, measured by {name} (prices)"


def _ranges(facts: ProblemData, below_s: float) -> HoldableRanges:
    far = np.empty((len(facts.kinds), facts.layers), dtype=np.int32)
    in_flight = facts.least_in_flight(1)
    for k, kind in enumerate(facts.kinds):
        far[k] = facts.farthest(kind, in_flight, below_s, facts.work(kind.device))
    return HoldableRanges(np.array([float(len(kind.members)) for kind in facts.kinds]), far)


def _candidates(facts: ProblemData) -> list[tuple[str, Array]]:
    """Prices to begin with, each per layer."""
    out = [("time", _weighted(facts)), ("number of layers", np.ones(facts.layers))]
    picks = sorted({0, len(facts.kinds) // 2, len(facts.kinds) - 1})
    if facts.problem.times:
        out += [("one device's times", facts.seconds(facts.kinds[k].device)) for k in picks]
    if facts.limited:
        kept = np.diff(facts.state) + facts.least_in_flight(1) * np.diff(facts.activation)
        out.append(("bytes", np.maximum(kept, 0.0)))
    out = [(name, price / price.sum()) for name, price in out if price.sum() > 0]
    if facts.limited:
        out += [
            (f"{a} and {b}", share * x + (1 - share) * y)
            for (a, x), (b, y) in itertools.combinations(out, 2)
            for share in (0.5, 0.8, 0.2)
        ]
    return out


def _weighted(facts: ProblemData) -> Array:
    """The least over devices of a layer's share of that device's time for everything."""
    if not facts.problem.times:
        return facts.seconds(0)
    least = np.full(facts.layers, np.inf)
    for kind in facts.kinds:
        seconds = facts.seconds(kind.device)
        total = seconds.sum()
        if total > 0:
            least = np.minimum(least, seconds / total)
    return np.where(np.isfinite(least), least, 0.0)


class _LayerPriceSearch:
    """Prices against one table of ranges; remembers the best."""

    def __init__(self, facts: ProblemData, ranges: HoldableRanges) -> None:
        self.layers = facts.layers
        self.ranges = ranges
        self.best: tuple[float, Array] = (np.inf, np.ones(facts.layers))

    def ratio(self, price: Array) -> float:
        """Σ y ÷ Σ π; below 1 is a proof."""
        return self._value(price)[0]

    def _value(self, price: Array) -> tuple[float, Ints]:
        """(Σ y ÷ Σ π, per kind the start of its best range)."""
        worth = np.zeros(self.layers + 1)
        np.cumsum(price, out=worth[1:])
        kinds = len(self.ranges.count)
        most, starts = np.empty(kinds), np.empty(kinds, dtype=np.int64)
        step = max(1, BLOCK // self.layers)
        for k in range(0, kinds, step):
            held = worth[self.ranges.far[k : k + step]]
            held -= worth[:-1]
            at = held.argmax(axis=1)
            starts[k : k + step] = at
            most[k : k + step] = held[np.arange(len(at)), at]
        total = float(worth[-1])
        value = float(most @ self.ranges.count) / total if total > 0 else np.inf
        if value < self.best[0]:
            self.best = (value, price)
        return value, starts

    def improve(self) -> float:
        """The least ratio that the subgradient method finds from the best price on."""
        kinds = len(self.ranges.count)
        steps = int(min(MAX_STEPS, MAX_LAYER_PRICE_CELLS / (kinds * self.layers)))
        price = self.best[1] * self.layers / self.best[1].sum()
        scale = price + price.mean()  # large layers' prices may move more
        reach, since = 1e-3, 0
        for _ in range(steps):
            before = self.best[0]
            value, starts = self._value(price)
            if value < 1 - LAYER_PRICE_MARGIN:
                break
            since = 0 if value < before - 1e-3 * reach else since + 1
            if since > 60:
                reach, since = reach / 2, 0
                price = self.best[1] * self.layers / self.best[1].sum()
                continue
            slope = self._cover(starts) - value  # of Σ y − ratio · Σ π
            steep = float((slope * slope) @ scale)
            if steep == 0:  # covered evenly: no price does better
                break
            size = (value - self.best[0] + reach) * self.layers / steep
            price = np.maximum(0.0, price - size * scale * slope)
            price = price * (self.layers / price.sum()) if price.any() else self.best[1]
        return self.best[0]

    def _cover(self, starts: Ints) -> Array:
        """How many devices' best ranges hold each layer."""
        ends = self.ranges.far[np.arange(len(starts)), starts]
        change = np.zeros(self.layers + 1)
        np.add.at(change, starts, self.ranges.count)
        np.add.at(change, ends, -self.ranges.count)
        out: Array = np.cumsum(change)[:-1]
        return out


# Prices once more, with one for every place in the pipeline, and the best of them.
#
# Every layer has a price π ≥ 0. Stages are counted from the last one on: 1F1B keeps k microbatches in flight
# in the k-th, so what fits a device there, and its worth in prices, shrinks with k. A plan puts at most one
# device in each place. With u ≥ 0 per device and v ≥ 0 per place, such that every range that device d can hold  # noqa: E501
# in place k is worth at most u_d + v_k, all stages are worth at most Σ u + Σ v (the dual of assigning devices
# to places); where that is less than Σ π, no plan is below the limit. u follows from π and v, so any π and v
# make a sound test.
#
# The best π, u and v are a linear program. v need not grow with k, so a range counts only in the farthest
# place where it fits, and only if no longer one fits as far. With the sums of prices up to each boundary as
# unknowns its rows have four entries at most, as an interior-point method needs (``convex_solvers``). Where
# memory does not depend on the place, all places are alike, and prices of layers alone could find no more.

MAX_STAGE_PRICE_CELLS = 3e7
"""Device kinds × layers²."""
MAX_ROWS = 200_000
MAX_UNKNOWNS = 800
"""64 different devices and 483 layers take about a second, what is just allowed some seconds."""
STAGE_PRICE_MARGIN = 1e-11
"""Relative; how far Σ u + Σ v must stay below Σ π, for sums round."""


class PlaceConstraints(NamedTuple):
    """A range each: the kind of device, its last class of places (counted from 1), its boundaries."""

    kind: Ints
    place: Ints
    start: Ints
    stop: Ints


def prove_by_stage_prices(facts: ProblemData, below_s: float) -> Proof:
    """Whether no plan's stages all take less than ``below_s``: proved, or not known."""
    layers, kinds = facts.layers, len(facts.kinds)
    in_flight, capacity = _places(facts)
    if kinds * layers**2 > MAX_STAGE_PRICE_CELLS or layers + kinds + len(in_flight) > MAX_UNKNOWNS:
        return Proof(None, f"{kinds} kinds of devices × {layers} layers are too many for the best prices")
    rows = _rows(facts, below_s, in_flight)
    if len(rows.kind) > MAX_ROWS:
        return Proof(None, f"{len(rows.kind)} ranges are too many for the best prices")
    ratio = _StagePriceSearch(facts, rows, capacity).least()
    by = "a price per layer and place" if len(in_flight) > 1 else "the best price per layer"
    if ratio < 1 - STAGE_PRICE_MARGIN:
        return Proof(True, f"below it, all devices hold at most {ratio:.6%} of the layers, measured by {by}")
    return Proof(None, f"the devices hold up to {ratio:.4%} of the layers below it, measured by {by}")


def _places(facts: ProblemData) -> tuple[Ints, Array]:
    """Per class of places that are alike: microbatches in flight, ascending, and how many they are."""
    in_flight = [facts.least_in_flight(k) if facts.limited else 1 for k in range(1, facts.most_stages + 1)]
    numbers, count = np.unique(np.array(in_flight), return_counts=True)
    return numbers, count.astype(float)


def _rows(facts: ProblemData, below_s: float, in_flight: Ints) -> PlaceConstraints:
    """The ranges whose constraints no other range's imply."""
    at = np.arange(facts.layers + 1)
    ahead = at[None, :] > at[:-1, None]
    fixed = facts.state - facts.state[:-1, None]
    fixed += facts.problem.receive_window * (facts.received + facts.received[:-1, None])
    largest = np.where(ahead, np.concatenate(([0.0], facts.workspace)), 0.0)
    fixed += np.maximum.accumulate(largest, axis=1)
    kept = facts.activation - facts.activation[:-1, None]
    found: list[tuple[Ints, Ints, Ints]] = []
    for kind in facts.kinds:
        work = facts.work(kind.device)
        fits = ahead & (work - work[:-1, None] < below_s)
        if not kind.may_be_first:
            fits[0] = False
        if not kind.may_be_last:
            fits[:, -1] = False
        place = np.where(fits, len(in_flight), 0)
        if kind.room_bytes < np.inf:
            place[fits] = _last_place(kind.room_bytes, fixed[fits], kept[fits], in_flight)
        start, stop = np.nonzero(_outermost(place))
        found.append((start, stop, place[start, stop]))
    kinds = np.repeat(np.arange(len(found)), [len(start) for start, _, _ in found])
    start, stop, last = (np.concatenate(column) for column in zip(*found, strict=True))
    return PlaceConstraints(kinds, last, start, stop)


def _last_place(room: float, fixed: Array, kept: Array, in_flight: Ints) -> Ints:
    """How many classes of places each range fits in; rounding is on the side of fitting."""
    spare = room - fixed + 1e-12 * (abs(room) + fixed)
    most = np.full(len(spare), np.inf)
    with np.errstate(over="ignore"):  # so little that any number fits
        np.divide(spare, kept, out=most, where=kept > 0)
    most = np.where(spare < 0, 0.0, most * (1 + 1e-12) + 1e-12)
    return np.searchsorted(in_flight, most, side="right")


def _outermost(place: Ints) -> Bools:
    """Where no longer range fits in as many classes of places."""
    longer = np.maximum.accumulate(np.maximum.accumulate(place, axis=0)[:, ::-1], axis=1)[:, ::-1]
    around = np.zeros_like(place)
    around[1:] = longer[:-1]
    around[:, :-1] = np.maximum(around[:, :-1], longer[:, 1:])
    return place > around


class _StagePriceSearch:
    """The linear program; every point on the way to its optimum is tried as a proof."""

    def __init__(self, facts: ProblemData, rows: PlaceConstraints, capacity: Array) -> None:
        self.layers, self.kinds = facts.layers, len(facts.kinds)
        self.rows, self.capacity = rows, capacity
        self.count = np.array([float(len(kind.members)) for kind in facts.kinds])
        self.first_row = np.flatnonzero(np.diff(rows.kind, prepend=-1))
        self.seconds = facts.seconds(0)
        self.u = facts.layers + 1  # where in x these begin: prices' sums at the boundaries 0 … L before them
        self.v = self.u + self.kinds
        self.zero = self.v + len(capacity)

    def least(self) -> float:
        """The least ratio found; stops at the first that is a proof."""
        start = self._start()
        best = self.ratio(start)
        for x in convex_solvers.points(self._program(), start, above=1.0):
            if best < 1 - STAGE_PRICE_MARGIN:
                break
            best = min(best, self.ratio(x))
        return best

    def ratio(self, x: Array) -> float:
        """(Σ u + Σ v) ÷ Σ π, with the prices and the v of a point, put right; below 1 is a proof."""
        worth = sums(np.maximum(0.0, np.diff(x[: self.u])))
        v = np.maximum.accumulate(np.maximum(0.0, x[self.v : self.zero])[::-1])[::-1]
        total = float(self._most(worth, v) @ self.count) + float(v @ self.capacity)
        return total / float(worth[-1]) if worth[-1] > 0 else np.inf

    def _most(self, worth: Array, v: Array) -> Array:
        """Per kind, what its ranges are worth more than their places, at most: u."""
        rows, out = self.rows, np.zeros(self.kinds)
        if len(rows.kind):
            over = worth[rows.stop] - worth[rows.start] - v[rows.place - 1]
            most = np.maximum.reduceat(over, self.first_row)
            out[rows.kind[self.first_row]] = np.maximum(0.0, most)
        return out

    def _program(self) -> convex_solvers.Program:
        rows, zero = self.rows, self.zero
        each, u, v = np.arange(self.layers), np.arange(self.u, self.v), np.arange(self.v, zero)

        def four(*columns: Ints | int) -> Ints:
            return np.stack(np.broadcast_arrays(*columns), axis=1)

        entries = (
            four(self.u + rows.kind, self.v + rows.place - 1, rows.start, rows.stop),
            four(each + 1, zero, zero, each),  # prices are not negative
            four(v, zero, zero, v + 1),  # v does not grow
            four(u, zero, zero, zero),
        )
        cost = np.concatenate((np.zeros(self.u), self.count, self.capacity, [0.0]))
        return convex_solvers.Program(np.concatenate(entries), np.r_[1 : self.layers, self.u : zero], cost)

    def _start(self) -> Array:
        """Prices after one device's times, with room on every side."""
        price = np.full(self.layers, 0.5 / self.layers)
        price += self.seconds / self.seconds.sum() / 2 if self.seconds.any() else price
        margin = 1 / (self.layers + self.kinds)
        classes = len(self.capacity)
        v = margin * np.arange(classes, 0, -1) / classes
        worth = sums(price / price.sum())
        return np.concatenate((worth, self._most(worth, v) + margin, v, [0.0]))
