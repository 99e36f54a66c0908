"""Evaluates the dual prices that a certificate brings along (weak duality); nothing is searched or trusted.

Every layer has a price π, of any sign, and every place in the pipeline, counted from the last stage, a price
v ≥ 0. Let u of a device be the most, over the places, that a range of layers which it can hold there in less
than the limit is worth above the place's price, and at least 0. A plan below the limit would split all layers
into such ranges, on devices and in places that are each used at most once, so Σ π ≤ Σ u + Σ v. If
Σ u + Σ v is less than Σ π, there is none, whatever the prices are and wherever they come from.

The prices of the layers' linear relaxations, of places, and the potentials of repeated layers (λ at every
boundary: π = 1 + λ(after) − λ(before)) are all of this form. Memory is taken with the least number in flight
that a place has, and without the receive window: more ranges are allowed than plans have.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from skyctl.planner.verification.problem_data import Array, DeviceKind, Ints, ProblemData, Proof, sums
from skyctl.records.plan import Witness

ROUNDING = 1e-11
"""Relative to the sum of all prices' sizes; how far Σ u + Σ v must stay below Σ π, for sums round."""


def prove(facts: ProblemData, below_s: float, witness: Witness) -> Proof:
    """Whether the prices prove that no plan's stages all take less than ``below_s`` seconds."""
    price = np.array(witness.layer_prices)
    if len(price) != facts.layers:
        return Proof(None, f"the witness prices {len(price)} layers, the problem has {facts.layers}")
    size = float(np.abs(price).sum())
    if not 0 < size < np.inf:
        return Proof(None, "the witness prices no layer")
    place = np.array(witness.place_prices[: facts.most_stages]) / size
    if len(place):
        place = np.pad(place, (0, facts.most_stages - len(place)))
    ratio, proved = _held(facts, below_s, price / size, place)
    if proved:
        return Proof(True, f"below it, all devices hold at most {ratio:.6%} of the layers, by its witness")
    return Proof(None, f"by its witness the devices may hold {ratio:.4%} of the layers below it")


def listed(facts: ProblemData, below_s: float) -> Proof:
    """The same by prices that nobody has to bring: time, bytes, and the number of layers."""
    least = np.inf
    for name, price in _known_prices(facts):
        ratio, proved = _held(facts, below_s, price, np.empty(0))
        if proved:
            return Proof(
                True,
                f"below it, all devices hold at most {ratio:.6%} of the layers, measured by {name} (prices)",
            )
        least = min(least, ratio)
    return Proof(None, f"the devices hold up to {least:.4%} of the layers below it, by time or by bytes")


def _held(facts: ProblemData, below_s: float, price: Array, place: Array) -> tuple[float, bool]:
    """((Σ u + Σ v) ÷ Σ π, whether that proves it) for prices whose sizes add up to 1."""
    worth = sums(price)
    total = float(worth[-1])
    held = float(place.sum())
    highest = _RangeMaximum(worth)
    for kind in facts.kinds:
        held += len(kind.members) * _device_price(facts, kind, below_s, highest, place)
    return held / total if total > 0 else np.inf, held < total - ROUNDING


def _known_prices(facts: ProblemData) -> list[tuple[str, Array]]:
    """By what they measure, each adding up to 1; where memory is limited mixtures as well."""
    seconds = [facts.seconds(kind.device) for kind in facts.kinds]
    shares = [x / x.sum() for x in seconds if x.sum() > 0]
    out = [("number of layers", np.ones(facts.layers))]
    if shares:
        out.append(("time", np.minimum.reduce(shares)))
    if facts.problem.times:
        out += [("one device's times", seconds[k]) for k in sorted({0, len(seconds) // 2, len(seconds) - 1})]
    if facts.limited:
        out.append(("bytes", np.diff(facts.state) + facts.least_in_flight(1) * np.diff(facts.activation)))
    out = [(name, np.maximum(price, 0.0) / price.sum()) for name, price in out if price.sum() > 0]
    if facts.limited:
        out += [
            (f"{a} and {b}", share * x + (1 - share) * y)
            for (a, x), (b, y) in combinations(out, 2)
            for share in (0.5, 0.8, 0.2)
        ]
    return out


def _device_price(
    facts: ProblemData, kind: DeviceKind, below_s: float, highest: _RangeMaximum, place: Array
) -> float:
    """u of one device: the most that a range is worth above its place's price."""
    work = facts.work(kind.device)
    most = 0.0
    if not len(place):
        return max(most, highest.above_starts(facts.farthest(kind, facts.least_in_flight(1), below_s, work)))
    in_flight = np.array([facts.least_in_flight(k) for k in range(1, facts.most_stages + 1)])
    for number in np.unique(in_flight):
        far = facts.farthest(kind, int(number), below_s, work)
        most = max(most, highest.above_starts(far) - float(place[in_flight == number].min()))
    return most


class _RangeMaximum:
    """Largest values of ranges of an array in constant time each (a sparse table)."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self.levels = [values]
        while 2 ** len(self.levels) <= len(values):
            below, half = self.levels[-1], 2 ** (len(self.levels) - 1)
            self.levels.append(np.maximum(below[:-half], below[half:]))

    def above_starts(self, far: Ints) -> float:
        """The largest ``values[stop] − values[start]`` with start < stop ≤ ``far[start]``, at least 0."""
        starts = np.flatnonzero(far > np.arange(len(far)))
        if not len(starts):
            return 0.0
        first, last = starts + 1, far[starts]
        level = np.frexp((last - first + 1).astype(float))[1] - 1
        most = 0.0
        for at in np.unique(level):
            here = level == at
            table = self.levels[at]
            top = np.maximum(table[first[here]], table[last[here] - 2**at + 1])
            most = max(most, float((top - self.values[starts[here]]).max()))
        return most
