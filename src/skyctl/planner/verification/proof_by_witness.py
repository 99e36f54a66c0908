"""Evaluates the dual prices that a certificate brings along (weak duality); nothing is searched or trusted.

Every layer has a price π, of any sign, and every place in the pipeline, counted from the last stage, a price
v ≥ 0. Let u of a device be the most, over the places, that a range of layers which it can hold there in less
than the limit is worth above the place's price, and at least 0. A plan below the limit would split all layers
into such ranges, on devices and in places that are each used at most once, so Σ π ≤ Σ u + Σ v. Where
Σ u + Σ v is less than Σ π there is none, whatever the prices are and wherever they come from.

The prices of the layers' linear relaxations, of places, and the potentials of repeated layers (λ at every
boundary: π = 1 + λ(after) − λ(before)) are all of this form. Memory is taken with the least number in flight
that a place has, and without the receive window: more ranges are allowed than plans have.
"""

from __future__ import annotations

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
    worth = sums(price / size)
    place = np.array(witness.place_prices[: facts.most_stages]) / size
    if len(place):
        place = np.pad(place, (0, facts.most_stages - len(place)))
    held = float(place.sum())
    highest = _RangeMaximum(worth)
    for kind in facts.kinds:
        held += len(kind.members) * _device_price(facts, kind, below_s, highest, place)
    ratio = held / float(worth[-1]) if worth[-1] > 0 else np.inf
    if held < float(worth[-1]) - ROUNDING:
        return Proof(True, f"below it, all devices hold at most {ratio:.6%} of the layers, by its witness")
    return Proof(None, f"by its witness the devices may hold {ratio:.4%} of the layers below it")


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
