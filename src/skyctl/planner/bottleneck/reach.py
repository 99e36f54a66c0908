"""How far every device gets within a limit, as arrays: the tables of all methods for many devices.

Rows are classes of devices that are alike (``subsets.Groups``), so every table has one row a class.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from skyctl.planner.bottleneck.subsets import Groups
from skyctl.planner.model import Model

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SLACK = 1e-11
"""Sums of the same layers at another place differ by less than this, relative to the limit."""


class Reach:
    """Ranges that time and memory allow. ``flying``: the least number in flight that any stage can have."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.layers = model.layers
        self.members = Groups(model).members
        self.sizes = np.array([len(group) for group in self.members])
        heads = [group[0] for group in self.members]
        kinds: dict[int, int] = {}
        self.kind = np.array([kinds.setdefault(model.time_kind[d], len(kinds)) for d in heads])
        row_of = {k: d for d, k in zip(reversed(heads), reversed(self.kind.tolist()), strict=True)}
        self.work: Floats = np.stack([model.work.array(row_of[k]) for k in range(len(kinds))])
        self.first = np.array([d in model.first for d in heads])
        self.last = np.array([d in model.last for d in heads])
        self.available: Floats = np.array([model.available[d] for d in heads])
        self.caps, self.cap = np.unique(self.available, return_inverse=True)
        self.unlimited = model.unlimited
        self.flying = model.flying(0, 1)
        self.windowed = bool(model.window) and not model.unlimited
        self.staged = (
            not model.unlimited and model.schedule in ("1f1b", "eager-1f1b") and model.activation[-1] > 0
        )
        self._state = np.array(model.state)
        self._activation = np.array(model.activation)
        self._output = np.array(model.output)
        self._workspace = _tops(np.array([layer.workspace_bytes for layer in model.problem.layers]))
        self._far: dict[int, Ints] = {}
        self._low: dict[int, Ints] = {}

    def need_bytes(self, start: Ints, stop: Ints, flying: int, *, window: bool = True) -> Floats:
        """``Model.need_bytes`` for arrays of (non-empty) ranges, by the same sums."""
        need: Floats = self._state[stop] - self._state[start]
        need = need + flying * (self._activation[stop] - self._activation[start])
        if self._workspace is not None:
            level = np.frexp(stop - start)[1].astype(np.int64) - 1
            need = need + np.maximum(
                self._workspace[level, start], self._workspace[level, stop - (1 << level)]
            )
        if window and self.windowed:
            ahead = np.where(start > 0, self._output[start - 1], 0.0)
            back = np.where(stop < self.layers, self._output[stop - 1], 0.0)
            need = need + self.model.window * (ahead + back)
        return need

    def time_far(self, limit_s: float, starts: Ints) -> Ints:
        """Per kind of times and start the largest stop within the limit (the start itself: none)."""
        if limit_s == math.inf:
            return np.full((len(self.work), len(starts)), self.layers)
        rows = [np.searchsorted(w, w[starts] + limit_s, side="right") - 1 for w in self.work]
        out: Ints = np.maximum(np.stack(rows), starts)
        return out

    def time_low(self, limit_s: float, stops: Ints) -> Ints:
        """Per kind of times and stop the smallest start within the limit (the stop itself: none)."""
        if limit_s == math.inf:
            return np.zeros((len(self.work), len(stops)), dtype=np.int64)
        rows = [np.searchsorted(w, w[stops] - limit_s, side="left") for w in self.work]
        out: Ints = np.minimum(np.stack(rows), stops)
        return out

    def memory_far(self, flying: int) -> Ints:
        """Per cap and start 0 … L the largest stop that fits (the start itself: none)."""
        known = self._far.get(flying)
        if known is None:
            at = np.arange(self.layers + 1)
            sums = self._state + flying * self._activation
            out = np.empty((len(self.caps), self.layers + 1), dtype=np.int64)
            for row, cap in enumerate(self.caps):
                if cap == math.inf:
                    out[row] = self.layers
                    continue
                far = np.searchsorted(sums, sums + cap * (1 + 1e-9), side="right")
                far = np.clip(far, at, self.layers)
                self._step(far, at, cap, flying, -1)
                out[row] = far
            known = self._far[flying] = out
        return known

    def memory_low(self, flying: int) -> Ints:
        """Per cap and stop 0 … L the smallest start that fits (the stop itself: none)."""
        known = self._low.get(flying)
        if known is None:
            at = np.arange(self.layers + 1)
            sums = self._state + flying * self._activation
            out = np.empty((len(self.caps), self.layers + 1), dtype=np.int64)
            for row, cap in enumerate(self.caps):
                if cap == math.inf:
                    out[row] = 0
                    continue
                low = np.searchsorted(sums, sums - cap * (1 + 1e-9), side="left") - 1
                low = np.clip(low, 0, at)
                self._step(low, at, cap, flying, 1)
                out[row] = low
            known = self._low[flying] = out
        return known

    def _step(self, ends: Ints, fixed: Ints, cap: float, flying: int, step: int) -> None:
        """Moves ``ends`` towards ``fixed`` until each range fits or is empty."""
        rest = np.flatnonzero(ends != fixed)
        while len(rest):
            start, stop = np.minimum(ends[rest], fixed[rest]), np.maximum(ends[rest], fixed[rest])
            rest = rest[self.need_bytes(start, stop, flying) > cap]
            ends[rest] += step
            rest = rest[ends[rest] != fixed[rest]]

    def far(self, limit_s: float, flying: int) -> Ints:
        """Per class and start 0 … L the largest stop that time, memory and ``last_stage`` allow."""
        return self.within(self.time_far(limit_s, np.arange(self.layers + 1))[self.kind], flying)

    def within(self, far: Ints, flying: int) -> Ints:
        """Of the stops that time allows those that memory and pins do."""
        out = far.copy() if self.unlimited else np.minimum(far, self.memory_far(flying)[self.cap])
        out[~self.last] = np.minimum(out[~self.last], self.layers - 1)
        out[~self.first, 0] = 0
        least: Ints = np.maximum(out, np.arange(self.layers + 1))
        return least

    def low(self, limit_s: float, flying: int) -> Ints:
        """Per class and stop 0 … L the smallest start that time, memory and ``first_stage`` allow."""
        out: Ints = self.time_low(limit_s, np.arange(self.layers + 1))[self.kind]
        if not self.unlimited:
            out = np.maximum(out, self.memory_low(flying)[self.cap])
        out[~self.first] = np.maximum(out[~self.first], 1)
        out[~self.last, self.layers] = self.layers
        return np.minimum(out, np.arange(self.layers + 1))

    def busy_s(self, row: int, start: int, stop: int) -> float:
        """What ``Model.busy_s`` says of a device of that class."""
        work = self.work[self.kind[row]]
        return float(work[stop] - work[start])


def _tops(values: Floats) -> Floats | None:
    """Largest value of 2^level layers from each on, [level, start]; None where all are zero."""
    if not values.any():
        return None
    tables = [values]
    while 2 ** len(tables) <= len(values):
        below, half = tables[-1], 2 ** (len(tables) - 1)
        tables.append(np.maximum(below, np.append(below[half:], np.zeros(half))))
    return np.stack(tables)
