"""A lower bound on the step of several pipelines side by side, of few devices: by what each set can take.

For every set of devices, as one pipeline over exactly these, paths through it (``iteration/relaxation.py``)
have the least seconds for each number of microbatches, over all orders and cuts. In a step of T seconds a set
takes no more of them than end by then, and the devices, parted into disjoint sets in the best way, must take
all. Unlike the bound by prices it knows that a pipeline's stages are held by its own devices, that it is
filled and drained, and that microbatches are whole. Of sums only the latency counts.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from skyctl.planner.hybrid.hybrid_model import HybridModel
from skyctl.planner.iteration.relaxation import INF, Array, Relaxation

MAX_DEVICES = 11
MAX_TABLE_CELLS, MAX_CELLS = 1e8, 1e9
"""Numbers of one table and of all, beyond which ``verify`` would take more than a minute."""
CELLS_PER_S = 6e7

Counts = npt.NDArray[np.int64]


def set_bound_s(model: HybridModel, value_s: float, deadline: float = math.inf) -> float:
    """The bound in seconds, no more than ``value_s``, a plan's step; 0: too many devices, or no time.

    Args:
        deadline: of ``time.perf_counter``.
    """
    n, wanted = model.devices, model.microbatches
    most = min(wanted - 1, _most_microbatches(model, value_s))
    cells = n * max(1, n - 1) * 2.0 ** max(0, n - 2) * model.layers**2
    left_s = deadline - time.perf_counter()
    if n > MAX_DEVICES or cells > MAX_TABLE_CELLS or cells * most > min(MAX_CELLS, CELLS_PER_S * left_s):
        return 0.0
    after_s = _least_after_s(model)
    try:
        end_s = _SetRelaxation(model, most, deadline).least_s()
    except TimeoutError:
        return 0.0
    end_s = np.append(end_s, np.repeat(end_s[-1:], wanted - 1 - most, axis=0), axis=0)  # no sooner, with more
    limits = np.unique(np.append(end_s[end_s < value_s - after_s], value_s - after_s))
    low, high = 0, len(limits)  # before the first of all ends no set takes any
    while high - low > 1:
        middle = (low + high) // 2
        if _most_together((end_s < limits[middle]).sum(axis=0)) < wanted:
            low = middle
        else:
            high = middle
    return float(limits[low]) + after_s


def _most_microbatches(model: HybridModel, step_s: float) -> int:
    """About how many all devices end in so many seconds, and one more."""
    whole_s = [work[-1] for work in model.base.work_s]
    return 1 + int(min(model.microbatches, sum(step_s / x if x > 0 else math.inf for x in whole_s)))


def _least_after_s(model: HybridModel) -> float:
    """The least seconds after the last backward: a sum's way out and in, and the slowest optimizer."""
    devices = range(model.devices)

    def nearest(d: int) -> float:
        others = [e for e in devices if e != d]
        out = min(model.base.link_cost(d, e).latency_s for e in others)
        return out + min(model.base.link_cost(e, d).latency_s for e in others)

    layers = np.stack([np.array([b - a for a, b in pairwise(sums)]) for sums in model.base.optimizer_s])
    return min(map(nearest, devices)) + float(layers.min(axis=0).max())


def _most_together(most: Counts) -> int:
    """The most that disjoint sets take together; ``most``: by set of devices (as bits), what it takes."""
    alone = most.tolist()
    best = [0] * len(alone)
    for devices in range(1, len(alone)):
        lowest = devices & -devices
        rest = part = devices ^ lowest
        total = best[rest]
        while True:
            total = max(total, alone[part | lowest] + best[rest ^ part])
            if not part:
                break
            part = (part - 1) & rest
        best[devices] = total
    return best[-1]


class _SetRelaxation(Relaxation):
    """The tables of ``Relaxation`` for 1, 2, … microbatches at once.

    ``end[set]`` is of shape (devices, numbers of microbatches, layers + 1); ``trip`` is as it is for one
    microbatch, which needs the least memory.
    """

    def __init__(self, model: HybridModel, most: int, deadline: float) -> None:
        self.deadline = deadline
        self.counts = np.arange(1.0, most + 1)[:, None, None]
        self.costs = [model.costs(count) for count in range(1, most + 1)]
        self._bars: dict[tuple[int, int], Array] = {}
        super().__init__(model.base)

    def least_s(self) -> Array:
        """By number of microbatches and set of devices (as bits), the least seconds."""
        none = np.full(len(self.counts), INF)
        first = sorted(self.model.may_be_first)
        columns = [
            np.min([self.end[s][d][:, 0] for d in first], axis=0) if self.end[s].ndim == 3 else none
            for s in range(len(self.end))
        ]
        return np.stack(columns, axis=1)

    def _bar(self, d: int, stages: int) -> Array:
        """[numbers, start, stop] → 0 where the range fits, infinity elsewhere; one entry without limits."""
        if (d, stages) not in self._bars:
            depths = [costs.least_in_flight(0, stages) for costs in self.costs]
            if self.model.unlimited:
                depths = depths[:1]
            self._bars[d, stages] = np.stack([self.barred(d, k) for k in depths])
        return self._bars[d, stages]

    def _fill(self, subset: int, d: int) -> None:
        if time.perf_counter() > self.deadline:
            raise TimeoutError
        layers, stages = self.model.layers, subset.bit_count()
        if self.end[subset].ndim != 3:
            self.end[subset] = np.full((self.model.devices, len(self.counts), layers + 1), INF)
        bar = self._bar(d, stages)
        if stages == 1:
            if d in self.model.may_be_last:
                each = (self.forward[d] + self.backward[d])[:, layers]
                self.trip[subset][d] = each + bar[0, :, layers]
                self.end[subset][d] = self.counts[:, 0] * each + bar[:, :, layers]
            return
        # this stage's starts and stops, with a layer left for each of the others
        starts, stops = slice(0, layers - stages + 1), slice(1, layers - stages + 2)
        f, b, bar = self.forward[d][starts, stops], self.backward[d][starts, stops], bar[:, starts, stops]
        ends = np.full((len(self.counts), layers - stages + 1), INF)
        rest = subset ^ (1 << d)
        for e in range(self.model.devices):
            if not rest >> e & 1 or not np.isfinite(self.trip[rest][e]).any():
                continue
            there, back, latency = self.messages[d][e]
            both = there + back + latency
            loaded = both + (self.counts[:, 0] - 1) * np.maximum(there, back) + self.trip[rest][e]
            after = np.maximum(both + self.end[rest][e], loaded)[:, None, stops]
            beyond = (both + self.trip[rest][e])[None, stops]
            end = np.maximum(self._spans(stages, f, b, beyond), (f + b) + after) + bar
            ends = np.minimum(ends, end.min(axis=2))
            self.trip[subset][d][starts] = np.minimum(
                self.trip[subset][d][starts], (f + b + beyond + bar[0]).min(axis=1)
            )
        self.end[subset][d][:, starts] = ends

    def _spans(self, stages: int, f: Array, b: Array, beyond: Array) -> Array:
        """``evaluation.least_span_s`` by number of microbatches."""
        k = self.costs[-1].least_in_flight(0, stages)  # of those that are more than that
        few, many = self.counts[:k], self.counts[k:]
        wait = np.maximum(0.0, beyond - (few - 1) * f)
        out = few * f + np.maximum(few * b + wait, b + beyond)
        if not len(many):
            return out
        idle = np.maximum(0.0, beyond - (k - 1) * f) + np.maximum(0.0, beyond - (k - 1) * b)
        turns = np.ceil(many / k)
        by_turns = turns * (f + b + beyond) + (many - 1 - (turns - 1) * k) * b
        return np.concatenate([out, np.maximum(many * (f + b) + idle, by_turns)])
