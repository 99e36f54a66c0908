"""How far every device gets within a limit, as arrays: the tables of all methods for many devices.

Rows are classes of devices that are alike (``DeviceGroups``), so every table has one row per class.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from skyctl.planner.bottleneck.device_subsets import DeviceGroups
from skyctl.planner.cost_model import CostModel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SUM_SLACK = 1e-11
"""Sums over equal layers in different positions differ by less than this, relative to the limit."""


class ReachTable:
    """Ranges of layers that time and memory allow, by class of devices that are alike.

    ``in_flight``: the fewest microbatches any stage can keep in flight.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.layers = model.layers
        self.members = DeviceGroups(model).members
        self.sizes = np.array([len(group) for group in self.members])
        heads = [group[0] for group in self.members]
        timings: dict[int, int] = {}
        self.timing = np.array([timings.setdefault(model.timing_class[d], len(timings)) for d in heads])
        row_of = {k: d for d, k in zip(reversed(heads), reversed(self.timing.tolist()), strict=True)}
        self.work: Floats = np.stack([model.work_s.array(row_of[k]) for k in range(len(timings))])
        self.may_be_first = np.array([d in model.may_be_first for d in heads])
        self.may_be_last = np.array([d in model.may_be_last for d in heads])
        self.available: Floats = np.array([model.available_bytes[d] for d in heads])
        self.caps, self.cap = np.unique(self.available, return_inverse=True)
        self.unlimited = model.unlimited
        self.in_flight = model.least_in_flight(0, 1)
        self.windowed = bool(model.receive_window) and not model.unlimited
        self.staged = (
            not model.unlimited
            and model.schedule in ("1f1b", "eager-1f1b")
            and model.activation_bytes[-1] > 0
        )
        self._state = np.array(model.state_bytes)
        self._activation = np.array(model.activation_bytes)
        self._output = np.array(model.output_bytes)
        self._workspace = _range_maxima(np.array([layer.workspace_bytes for layer in model.problem.layers]))
        self._far: dict[int, Ints] = {}
        self._low: dict[int, Ints] = {}

    def need_bytes(self, start: Ints, stop: Ints, in_flight: int) -> Floats:
        """``CostModel.need_bytes`` for arrays of (non-empty) ranges, rounded as it is."""
        need: Floats = self._state[stop] - self._state[start]
        need = need + in_flight * (self._activation[stop] - self._activation[start])
        if self._workspace is not None:
            level = np.frexp(stop - start)[1].astype(np.int64) - 1
            need = need + np.maximum(
                self._workspace[level, start], self._workspace[level, stop - (1 << level)]
            )
        if self.windowed:
            ahead = np.where(start > 0, self._output[start - 1], 0.0)
            back = np.where(stop < self.layers, self._output[stop - 1], 0.0)
            need = need + self.model.receive_window * (ahead + back)
        return need

    def time_far(self, limit_s: float, starts: Ints) -> Ints:
        """By timing class and start, the largest stop within the limit (the start itself: none)."""
        if limit_s == math.inf:
            return np.full((len(self.work), len(starts)), self.layers)
        rows = [np.searchsorted(w, w[starts] + limit_s, side="right") - 1 for w in self.work]
        out: Ints = np.maximum(np.stack(rows), starts)
        return out

    def time_low(self, limit_s: float, stops: Ints) -> Ints:
        """By timing class and stop, the smallest start within the limit (the stop itself: none)."""
        if limit_s == math.inf:
            return np.zeros((len(self.work), len(stops)), dtype=np.int64)
        rows = [np.searchsorted(w, w[stops] - limit_s, side="left") for w in self.work]
        out: Ints = np.minimum(np.stack(rows), stops)
        return out

    def memory_far(self, in_flight: int) -> Ints:
        """By memory size and start 0 … L, the largest stop that fits (the start itself: none)."""
        table = self._far.get(in_flight)
        if table is None:
            at = np.arange(self.layers + 1)
            sums = self._state + in_flight * self._activation
            out = np.empty((len(self.caps), self.layers + 1), dtype=np.int64)
            for row, cap in enumerate(self.caps):
                if cap == math.inf:
                    out[row] = self.layers
                    continue
                far = np.searchsorted(sums, sums + cap * (1 + 1e-9), side="right")
                far = np.clip(far, at, self.layers)
                self._step(far, at, cap, in_flight, -1)
                out[row] = far
            table = self._far[in_flight] = out
        return table

    def memory_low(self, in_flight: int) -> Ints:
        """By memory size and stop 0 … L, the smallest start that fits (the stop itself: none)."""
        table = self._low.get(in_flight)
        if table is None:
            at = np.arange(self.layers + 1)
            sums = self._state + in_flight * self._activation
            out = np.empty((len(self.caps), self.layers + 1), dtype=np.int64)
            for row, cap in enumerate(self.caps):
                if cap == math.inf:
                    out[row] = 0
                    continue
                low = np.searchsorted(sums, sums - cap * (1 + 1e-9), side="left") - 1
                low = np.clip(low, 0, at)
                self._step(low, at, cap, in_flight, 1)
                out[row] = low
            table = self._low[in_flight] = out
        return table

    def _step(self, ends: Ints, fixed: Ints, cap: float, in_flight: int, step: int) -> None:
        """Moves ``ends`` towards ``fixed`` until each range fits or is empty."""
        rest = np.flatnonzero(ends != fixed)
        while len(rest):
            start, stop = np.minimum(ends[rest], fixed[rest]), np.maximum(ends[rest], fixed[rest])
            rest = rest[self.need_bytes(start, stop, in_flight) > cap]
            ends[rest] += step
            rest = rest[ends[rest] != fixed[rest]]

    def far(self, limit_s: float, in_flight: int) -> Ints:
        """By class and start 0 … L, the largest stop that time, memory and ``last_stage`` allow."""
        return self.within(self.time_far(limit_s, np.arange(self.layers + 1))[self.timing], in_flight)

    def within(self, far: Ints, in_flight: int) -> Ints:
        """Cuts the farthest stops that time allows (``far``) to those that memory and pins allow."""
        out = far.copy() if self.unlimited else np.minimum(far, self.memory_far(in_flight)[self.cap])
        out[~self.may_be_last] = np.minimum(out[~self.may_be_last], self.layers - 1)
        out[~self.may_be_first, 0] = 0
        least: Ints = np.maximum(out, np.arange(self.layers + 1))
        return least

    def low(self, limit_s: float, in_flight: int) -> Ints:
        """By class and stop 0 … L, the smallest start that time, memory and ``first_stage`` allow."""
        out: Ints = self.time_low(limit_s, np.arange(self.layers + 1))[self.timing]
        if not self.unlimited:
            out = np.maximum(out, self.memory_low(in_flight)[self.cap])
        out[~self.may_be_first] = np.maximum(out[~self.may_be_first], 1)
        out[~self.may_be_last, self.layers] = self.layers
        return np.minimum(out, np.arange(self.layers + 1))


class RangeMemory:
    """``CostModel.need_bytes`` in numpy, for many ranges of layers at once."""

    def __init__(self, model: CostModel) -> None:
        self.receive_window = model.receive_window
        self.state = np.array(model.state_bytes)
        self.activation = np.array(model.activation_bytes)
        self.received = np.array([0.0, *model.output_bytes[:-1], 0.0])
        workspaces = [layer.workspace_bytes for layer in model.problem.layers]
        self.workspace = _range_maxima(np.array([*workspaces, 0.0]))

    def need(self, start: Ints, stop: Ints) -> tuple[Floats, Floats]:
        """(bytes whatever is in flight, bytes per microbatch in flight) of each range [start, stop)."""
        fixed = self.state.take(stop) - self.state.take(start)
        kept = self.activation.take(stop) - self.activation.take(start)
        if self.workspace is not None:
            width = len(self.state)
            level = np.frexp(np.maximum(stop - start, 1))[1] - 1
            half = np.maximum(stop - (1 << level), 0)
            first, second = level * width + start, level * width + half
            fixed += np.maximum(self.workspace.take(first), self.workspace.take(second))
        if self.receive_window:
            fixed += self.receive_window * (self.received.take(start) + self.received.take(stop))
        return fixed, kept


def _range_maxima(values: Floats) -> Floats | None:
    """A sparse table of range maxima, [level, start]: the largest of 2^level values; None if all are zero."""
    if not values.any():
        return None
    tables = [values]
    while 2 ** len(tables) <= len(values):
        below, half = tables[-1], 2 ** (len(tables) - 1)
        tables.append(np.maximum(below, np.append(below[half:], np.zeros(half))))
    return np.stack(tables)
