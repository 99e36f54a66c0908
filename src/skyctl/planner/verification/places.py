"""Prices once more, with one for every place in the pipeline, and the best of them.

Every layer has a price π ≥ 0. Stages are counted from the last one on: 1F1B keeps k microbatches in flight
in the k-th, so what fits a device there, and its worth in prices, shrinks with k. A plan puts at most one
device in each place. With u ≥ 0 per device and v ≥ 0 per place, such that every range that device d can hold
in place k is worth at most u_d + v_k, all stages are worth at most Σ u + Σ v (the dual of assigning devices
to places); where that is less than Σ π, no plan is below the limit. u follows from π and v, so any π and v
make a sound test.

The best π, u and v are a linear program. v need not grow with k, so a range counts only in the farthest
place where it fits, and only if no longer one fits as far. With the sums of prices up to each boundary as
unknowns its rows have four entries at most, which an interior-point method needs (``interior.py``). Where
memory does not depend on the place, all places are alike, and this is the best that ``prices`` could find.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from skyctl.planner.verification import interior
from skyctl.planner.verification.facts import Array, Bools, Facts, Ints, sums
from skyctl.planner.verification.found import Proof

MAX_CELLS = 3e7
"""Device kinds × layers²."""
MAX_ROWS = 200_000
MAX_UNKNOWNS = 800
"""64 different devices and 483 layers take about a second, what is just allowed some seconds."""
MARGIN = 1e-11
"""Relative; how far Σ u + Σ v must stay below Σ π, for sums round."""


class Rows(NamedTuple):
    """A range each: the kind of device, its last class of places (counted from 1), its boundaries."""

    kind: Ints
    place: Ints
    start: Ints
    stop: Ints


def prove(facts: Facts, below_s: float) -> Proof:
    """Whether no plan's stages all take less than ``below_s``: proved, or not known."""
    layers, kinds = facts.layers, len(facts.kinds)
    flying, capacity = _places(facts)
    if kinds * layers**2 > MAX_CELLS or layers + kinds + len(flying) > MAX_UNKNOWNS:
        return Proof(None, f"{kinds} kinds of devices × {layers} layers are too many for the best prices")
    rows = _rows(facts, below_s, flying)
    if len(rows.kind) > MAX_ROWS:
        return Proof(None, f"{len(rows.kind)} ranges are too many for the best prices")
    ratio = _Search(facts, rows, capacity).least()
    by = "a price per layer and place" if len(flying) > 1 else "the best price per layer"
    if ratio < 1 - MARGIN:
        return Proof(True, f"below it, all devices hold at most {ratio:.6%} of the layers, measured by {by}")
    return Proof(None, f"the devices hold up to {ratio:.4%} of the layers below it, measured by {by}")


def _places(facts: Facts) -> tuple[Ints, Array]:
    """Per class of places that are alike: microbatches in flight, ascending, and how many they are."""
    flying = [facts.flying(k) if facts.limited else 1 for k in range(1, facts.most_stages + 1)]
    numbers, count = np.unique(np.array(flying), return_counts=True)
    return numbers, count.astype(float)


def _rows(facts: Facts, below_s: float, flying: Ints) -> Rows:
    """The ranges that count."""
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
        place = np.where(fits, len(flying), 0)
        if kind.room_bytes < np.inf:
            place[fits] = _last_place(kind.room_bytes, fixed[fits], kept[fits], flying)
        start, stop = np.nonzero(_outermost(place))
        found.append((start, stop, place[start, stop]))
    kinds = np.repeat(np.arange(len(found)), [len(start) for start, _, _ in found])
    start, stop, last = (np.concatenate(column) for column in zip(*found, strict=True))
    return Rows(kinds, last, start, stop)


def _last_place(room: float, fixed: Array, kept: Array, flying: Ints) -> Ints:
    """How many classes of places each range fits in; rounding is on the side of fitting."""
    spare = room - fixed + 1e-12 * (abs(room) + fixed)
    most = np.full(len(spare), np.inf)
    np.divide(spare, kept, out=most, where=kept > 0)
    most = np.where(spare < 0, 0.0, most * (1 + 1e-12) + 1e-12)
    return np.searchsorted(flying, most, side="right")


def _outermost(place: Ints) -> Bools:
    """Where no longer range fits in as many classes of places."""
    longer = np.maximum.accumulate(np.maximum.accumulate(place, axis=0)[:, ::-1], axis=1)[:, ::-1]
    around = np.zeros_like(place)
    around[1:] = longer[:-1]
    around[:, :-1] = np.maximum(around[:, :-1], longer[:, 1:])
    return place > around


class _Search:
    """The linear program; every point on the way to its optimum is tried as a proof."""

    def __init__(self, facts: Facts, rows: Rows, capacity: Array) -> None:
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
        for x in interior.points(self._program(), start, above=1.0):
            if best < 1 - MARGIN:
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

    def _program(self) -> interior.Program:
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
        return interior.Program(np.concatenate(entries), np.r_[1 : self.layers, self.u : zero], cost)

    def _start(self) -> Array:
        """Prices after one device's times, with room on every side."""
        price = np.full(self.layers, 0.5 / self.layers)
        price += self.seconds / self.seconds.sum() / 2 if self.seconds.any() else price
        margin = 1 / (self.layers + self.kinds)
        classes = len(self.capacity)
        v = margin * np.arange(classes, 0, -1) / classes
        worth = sums(price / price.sum())
        return np.concatenate((worth, self._most(worth, v) + margin, v, [0.0]))
