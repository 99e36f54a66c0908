"""Layers that repeat, and what a device can hold of them: an edge from where a stage starts to where it ends.

If layers [a, b) have period p, what fits depends only on the phase (position mod p) a stage starts in. Any
stage inside can be made shorter by p. So a stage is an edge between nodes: the positions before a, the p
phases, the positions after b; and per device only the longest range of each edge matters.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skyctl.planner.bottleneck.reach_table import Floats, Ints, ReachTable
from skyctl.planner.cost_model import CostModel

Bools = npt.NDArray[np.bool_]

MAX_PERIOD = 8
NO_EDGE = -(10**8)
"""The length of an edge that a device can't take, negative beyond any sum of lengths."""


class LayerRun(NamedTuple):
    """Cuts at positions start … stop are alike where they differ by multiples of ``period``."""

    start: int
    stop: int
    period: int


class StageEdge(NamedTuple):
    """A stage from node ``source`` to node ``target``; ``least`` layers at least (nodes: ``StageEdges``)."""

    source: int
    target: int
    least: int


def find_run(model: CostModel, reach: ReachTable) -> LayerRun | None:
    """The longest run of layers that repeat with a short period in all that matters; None: none is long."""
    ids = _alike(model, reach)
    best: tuple[int, LayerRun] | None = None
    for period in range(1, min(MAX_PERIOD, model.layers // 3) + 1):
        same = np.concatenate(([False], ids[period:] == ids[:-period], [False]))
        turns = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        if not len(turns):
            continue
        i, j = turns[np.argmax(turns[:, 1] - turns[:, 0])]
        # Position 0 and L are nodes of their own; with a window, what a stage receives must repeat too.
        start, stop = max(1, int(i) + reach.windowed), min(model.layers - 1, int(j) + period)
        cost = model.layers - (stop - start) + period
        if stop - start >= 3 * period and (best is None or cost < best[0]):
            best = (cost, LayerRun(start, stop, period))
    return best[1] if best else None


def _alike(model: CostModel, reach: ReachTable) -> Ints:
    """A number by layer, equal for layers that are alike on every device."""
    problem = model.problem
    columns: list[Floats] = []
    times = [problem.times.get(model.ids[group[0]]) for group in reach.members]
    for layer_times in dict.fromkeys(times):
        if layer_times is None:
            columns.append(np.array([layer.flops for layer in problem.layers]))
        else:
            columns += [np.array(layer_times.forward_s), np.array(layer_times.backward_s)]
    if not model.unlimited:
        for field in ("state_bytes", "activation_bytes", "workspace_bytes"):
            columns.append(np.array([getattr(layer, field) for layer in problem.layers]))
    if reach.windowed:
        columns.append(np.array(model.output_bytes))
    ids: Ints = np.zeros(model.layers, dtype=np.int64)
    for column in columns:
        values = np.unique(column, return_inverse=True)[1]
        ids = np.unique(ids * (values.max() + 1) + values, return_inverse=True)[1]
    return ids


class StageEdges:
    """All edges between the kept nodes, and how long each class of devices can make them.

    Nodes 0 … p − 1 are the phases, the others positions: ``node_of``. ``kept``: interior positions outside
    the run at which stages may meet; the ends 0 and L always are nodes.
    """

    def __init__(self, model: CostModel, reach: ReachTable, run: LayerRun, kept: tuple[int, ...]) -> None:
        self.model, self.reach, self.run = model, reach, run
        before = [0, *(x for x in kept if x < run.start)]
        after = [*(x for x in kept if x > run.stop), model.layers]
        self.places = [*before, *after]
        self.node_of = {x: run.period + i for i, x in enumerate(self.places)}
        self.source, self.sink = run.period, self.node_of[model.layers]
        self._before, self._after = before, after
        self.edges: list[StageEdge] = []
        self._fixed: list[tuple[int, int]] = []
        self._forward: list[tuple[int, int, Ints]] = []
        self._backward: list[tuple[int, int, Ints]] = []
        self._list()

    def _list(self) -> None:
        """``edges`` in the order of ``_forward``, ``_backward``, ``_fixed``."""
        run, node = self.run, self.node_of
        starts = [*self._before, *range(run.start, run.start + run.period)]
        for s in starts:
            source = node.get(s, (s - run.start) % run.period)
            for phase in range(run.period):
                first = max(s + 1, run.start)
                stop = first + (phase - (first - run.start)) % run.period
                self._forward.append((s, stop, self._most(s, stop)))
                self.edges.append(StageEdge(source, phase, stop - s))
        for e in self._after:
            for phase in range(run.period):
                start = run.stop - (run.stop - run.start - phase) % run.period
                self._backward.append((start, e, self._most(start, e)))
                self.edges.append(StageEdge(phase, node[e], e - start))
        for s in [*self._before, *self._after]:
            for e in [*self._before, *self._after]:
                if s < e:
                    self._fixed.append((s, e))
                    self.edges.append(StageEdge(node[s], node[e], e - s))

    def _most(self, start: int, stop: int) -> Ints:
        """Per class how many of the ranges that grow from [start, stop) by the period fit (in memory)."""
        run, reach = self.run, self.reach
        if stop <= run.stop:
            stops = np.arange(stop, run.stop + 1, run.period)
            starts = np.full(len(stops), start)
        else:
            starts = np.arange(start, run.start - 1, -run.period)
            stops = np.full(len(starts), stop)
        if reach.unlimited:
            count = np.full(len(reach.members), len(starts))
        else:
            needs = reach.need_bytes(starts, stops, reach.in_flight)
            count = np.searchsorted(np.maximum.accumulate(needs), reach.caps, side="right")[reach.cap]
        return count * _holds(reach, start, stop, math.inf)

    def lengths(self, limit_s: float) -> Ints:
        """[class, edge]: the most layers within the limit, ``NO_EDGE`` where there are none."""
        run, reach = self.run, self.reach
        p = run.period
        columns = []
        starts = list(dict.fromkeys(s for s, _, _ in self._forward))
        far = reach.time_far(limit_s, np.array(starts))[reach.timing]
        row = {s: i for i, s in enumerate(starts)}
        for s, stop, most in self._forward:
            count = np.minimum((np.minimum(far[:, row[s]], run.stop) - stop) // p + 1, most)
            columns.append(np.where(count > 0, stop - s + (count - 1) * p, NO_EDGE))
        low = reach.time_low(limit_s, np.array(self._after))[reach.timing]
        column = {e: i for i, e in enumerate(self._after)}
        for start, e, most in self._backward:
            count = np.minimum((start - np.maximum(low[:, column[e]], run.start)) // p + 1, most)
            columns.append(np.where(count > 0, e - start + (count - 1) * p, NO_EDGE))
        for s, e in self._fixed:
            columns.append(np.where(_holds(reach, s, e, limit_s), e - s, NO_EDGE))
        return np.stack(columns, axis=1)

    def candidates(self, low_s: float, high_s: float) -> Floats:
        """The seconds of these edges' ranges, in (low, high], sorted, equal ones (but for rounding) once."""
        run, seconds = self.run, []
        for work in self.reach.work:
            for s in dict.fromkeys(s for s, _, _ in self._forward):
                i = np.searchsorted(work, work[s] + np.array([low_s, high_s]), side="right")
                seconds.append(work[max(int(i[0]), run.start) : min(int(i[1]), run.stop + 1)] - work[s])
            for e in self._after:
                i = np.searchsorted(work, work[e] - np.array([high_s, low_s]), side="left")
                seconds.append(work[e] - work[max(int(i[0]), run.start) : min(int(i[1]), run.stop + 1)])
            seconds.append(np.array([work[e] - work[s] for s, e in self._fixed]))
        every = np.sort(np.concatenate(seconds))
        every = every[(every > low_s) & (every <= high_s)]
        fresh = np.ones(len(every), dtype=bool)
        fresh[:-1] = every[1:] > every[:-1] * (1 + 1e-10)  # the last of a group of equals
        return every[fresh]


def needless_cuts(reach: ReachTable, run: LayerRun, limit_s: float) -> set[int]:
    """Positions outside the run at which no stage need end: whoever can hold the layers from anywhere before
    it up to it can hold them up to the run as well (behind the run: from it, and from the run on)."""
    if reach.windowed:
        return set()
    out = set()
    for x in range(1, run.start):
        if not any(
            np.any(_holds(reach, y, x, limit_s) & ~_holds(reach, y, run.start, limit_s)) for y in range(x)
        ):
            out.add(x)
    for x in range(run.stop + 1, reach.layers):
        if not any(
            np.any(_holds(reach, x, y, limit_s) & ~_holds(reach, run.stop, y, limit_s))
            for y in range(x + 1, reach.layers + 1)
        ):
            out.add(x)
    return out


def _holds(reach: ReachTable, start: int, stop: int, limit_s: float) -> Bools:
    """Per class whether it may hold [start, stop) within the limit."""
    out: Bools = (reach.work[:, stop] - reach.work[:, start] <= limit_s)[reach.timing]
    if not reach.unlimited:
        need = reach.need_bytes(np.array([start]), np.array([stop]), reach.in_flight)
        out = out & (need[0] <= reach.available)
    if start == 0:
        out = out & reach.may_be_first
    if stop == reach.layers:
        out = out & reach.may_be_last
    return out
