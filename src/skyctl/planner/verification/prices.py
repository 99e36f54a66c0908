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

import numpy as np

from skyctl.planner.verification.facts import Array, Facts, Ints
from skyctl.planner.verification.found import Proof

MAX_CELLS = 6e8
"""Device kinds × layers × evaluations of a price: about ten seconds."""
MAX_STEPS = 6_000
MARGIN = 1e-11
"""Relative; how far Σ y must stay below Σ π, for sums round."""
BLOCK = 1 << 21
"""Cells of a table of ranges looked at at a time."""


@dataclass(frozen=True)
class Ranges:
    """Per kind of device its number, and its ranges: ``far[k, start]`` is the last boundary."""

    count: Array
    far: np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def listed(facts: Facts, below_s: float) -> Proof:
    """``prove`` with the prices of the list alone: quick."""
    return prove(facts, below_s, improve=False)


def prove(facts: Facts, below_s: float, *, improve: bool = True) -> Proof:
    """Whether no plan's stages all take less than ``below_s``: proved, or not known."""
    search = _Search(facts, _ranges(facts, below_s))
    for name, price in _candidates(facts):
        ratio = search.ratio(price)
        if ratio < 1 - MARGIN:
            return Proof(True, _words(ratio, name))
    ratio = search.improve() if improve else search.best[0]
    if ratio < 1 - MARGIN:
        return Proof(True, _words(ratio, "a price per layer"))
    return Proof(
        None, f"the devices hold up to {ratio:.4%} of the layers' price below it, at the best prices found"
    )


def _words(ratio: float, name: str) -> str:
    return f"below it, all devices hold at most {ratio:.6%} of the layers, measured by {name} (prices)"


def _ranges(facts: Facts, below_s: float) -> Ranges:
    far = np.empty((len(facts.kinds), facts.layers), dtype=np.int32)
    flying = facts.flying(1)
    for k, kind in enumerate(facts.kinds):
        far[k] = facts.farthest(kind, flying, below_s, facts.work(kind.device))
    return Ranges(np.array([float(len(kind.members)) for kind in facts.kinds]), far)


def _candidates(facts: Facts) -> list[tuple[str, Array]]:
    """Prices to begin with, each per layer."""
    out = [("time", _weighted(facts)), ("number of layers", np.ones(facts.layers))]
    picks = sorted({0, len(facts.kinds) // 2, len(facts.kinds) - 1})
    if facts.problem.times:
        out += [("one device's times", facts.seconds(facts.kinds[k].device)) for k in picks]
    if facts.limited:
        kept = np.diff(facts.state) + facts.flying(1) * np.diff(facts.activation)
        out.append(("bytes", np.maximum(kept, 0.0)))
    out = [(name, price / price.sum()) for name, price in out if price.sum() > 0]
    if facts.limited:
        out += [
            (f"{a} and {b}", share * x + (1 - share) * y)
            for (a, x), (b, y) in itertools.combinations(out, 2)
            for share in (0.5, 0.8, 0.2)
        ]
    return out


def _weighted(facts: Facts) -> Array:
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


class _Search:
    """Prices against one table of ranges; remembers the best."""

    def __init__(self, facts: Facts, ranges: Ranges) -> None:
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
        steps = int(min(MAX_STEPS, MAX_CELLS / (kinds * self.layers)))
        price = self.best[1] * self.layers / self.best[1].sum()
        scale = price + price.mean()  # large layers' prices may move more
        reach, since = 1e-3, 0
        for _ in range(steps):
            before = self.best[0]
            value, starts = self._value(price)
            if value < 1 - MARGIN:
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
