"""What a device can hold of a model within seconds and bytes, for proofs about trips."""

from __future__ import annotations

import numpy as np

from skyctl.planner.verification.facts import Array, Facts, Ints, sums

ROUND = 1e-9


class Store:
    """What a device can hold of the model (1 in all) within seconds and memory.

    A layer counts for the least share that it has of any device's time for everything. ``rate``: the most a
    device holds a second; ``least``: the least seconds of a stage, layers that count for little left out, and
    ``small_stages`` what that may be wrong by for all of these; ``forward``, ``backward``: least shares.
    """

    def __init__(self, facts: Facts, most_s: float) -> None:
        self.facts = facts
        self.most_s = most_s
        seconds = np.stack([facts.seconds(d) for d in range(facts.devices)])
        totals = seconds.sum(axis=1, keepdims=True)
        shares = np.divide(seconds, totals, out=np.zeros_like(seconds), where=totals > 0)
        value = shares.min(axis=0)
        self.value = value / value.sum() if value.sum() > 0 else value
        quick = (seconds <= 0) & (self.value > 0)
        rate = np.divide(self.value, seconds, out=np.zeros_like(seconds), where=seconds > 0)
        self.rate = np.where(quick.any(axis=1), np.inf, rate.max(axis=1))
        self.usable = bool(np.isfinite(self.rate).all() and (self.rate > 0).all())
        small = self.value < 0.2 * np.median(self.value)
        self.least = seconds[:, ~small].min(axis=1)
        self.small_stages = float(np.sort(self.least)[::-1][: int(small.sum())].sum())
        self.least_trip = (1 - ROUND) / float(self.rate.max()) if self.usable else 0.0
        forward = np.stack([facts.columns(d)[0] for d in range(facts.devices)])
        share = np.divide(forward, seconds, out=np.full_like(seconds, 0.5), where=seconds > 0)
        self.forward, self.backward = float(share.min()), float(1 - share.max())
        self._kinds = {d: kind for kind in facts.kinds for d in kind.members}
        self._tables: dict[tuple[int, int], tuple[Array, Array]] = {}

    def most(self, device: int, flying: int, seconds: Array) -> Array:
        """The most that a stage of at most so many seconds holds there."""
        kind = self._kinds[device]
        key = (kind.device, flying if self.facts.limited else 1)
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        times, held = self._tables[key]
        return held[np.searchsorted(times, seconds * (1 + 1e-12), side="right")]

    def _table(self, device: int, flying: int) -> tuple[Array, Array]:
        """(seconds of every range that fits, ascending; the most held within each, 0 first)."""
        work = self.facts.work(device)
        starts, stops = self._ranges(device, flying, work)
        value = sums(self.value)
        times, held = work[stops] - work[starts], value[stops] - value[starts]
        order = np.argsort(times, kind="stable")
        return times[order], np.concatenate([[0.0], np.maximum.accumulate(held[order])])

    def _ranges(self, device: int, flying: int, work: Array) -> tuple[Ints, Ints]:
        """(starts, stops) of every range that fits."""
        kind, within = self._kinds[device], self.most_s * (1 + 1e-9)
        each = np.arange(self.facts.layers)
        if self.facts.windowed:
            found = [np.flatnonzero(self.facts.stops(kind, int(p), flying, within, work)) for p in each]
            return np.repeat(each, [len(stops) for stops in found]), np.concatenate(found)
        count = self.facts.farthest(kind, flying, within, work) - each
        starts = np.repeat(each, count)
        return starts, starts + 1 + np.arange(len(starts)) - np.repeat(np.cumsum(count) - count, count)
