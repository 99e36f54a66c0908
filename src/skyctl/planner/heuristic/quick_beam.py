"""Objective ``bottleneck`` in milliseconds: a narrow beam from the last layer to the first.

Within a limit a device takes as many layers as it can, counted back from the start of the next stage; so all
that matters is which device comes next. A state is the set of devices used and the layer reached, and the
best are those that wasted least: each device is charged what it could have held in its best position (its
price) less what it holds. From the last layer on, the number of stages to the end, and with it the memory of
1F1B, is known. Beam search as in Lowerre (1976); the limit is bisected. With as many states as there are sets
of devices it is exact.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skyctl.planner.bottleneck.device_subsets import DeviceGroups
from skyctl.planner.bottleneck.reach_table import RangeMemory
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.evaluation import bottleneck_s
from skyctl.planner.heuristic.plan_batch import Array, Ints

Keys = npt.NDArray[np.uint64]
LIMIT_ROUNDING = 1 + 1e-12
MOST_SHIFTS = 200


@dataclass
class _BeamStates:
    """The beam: layer reached, devices used of each group, waste so far, and a hash of the used ones."""

    at: Ints
    used: Ints
    waste: Array
    key: Keys


class QuickBeam:
    """The beam search of one problem; devices that are alike are one group."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.members = DeviceGroups(model).members
        self.leads = np.array([group[0] for group in self.members])
        self.number = np.array([len(group) for group in self.members])
        self.first = np.array([d in model.may_be_first for d in self.leads])
        self.last = np.array([d in model.may_be_last for d in self.leads])
        self.available = np.array(model.available_bytes)[self.leads]
        self.related = not model.problem.times
        self.flops = np.concatenate([[0.0], np.cumsum([layer.flops for layer in model.problem.layers])])
        self.speeds = np.array([model.problem.devices[d].flops_per_s for d in self.leads])
        self.memory = RangeMemory(model)
        self.bytes = self.memory.state + self.memory.activation
        self.deep = model.activation_bytes[-1] > 0
        self.hashes = np.random.default_rng(0).integers(1, 1 << 63, len(self.members)).astype(np.uint64)
        self.work = self._work()
        self._fitting_starts: dict[int, Ints] = {}

    def _work(self) -> Array:
        """Prefix sums of each layer's share of all work."""
        if self.related:
            share: Array = self.flops / max(self.flops[-1], 1e-300)
            return share
        total = np.zeros(self.model.layers + 1)
        for d, number in zip(self.leads, self.number, strict=True):
            sums = self.model.work_s.array(d)
            total += number * sums / max(sums[-1], 1e-300)
        out: Array = total / max(total[-1], 1e-300)
        return out

    def volume_s(self) -> float:
        """Roughly the least bottleneck if layers could be cut anywhere and memory did not matter."""
        wholes = [self.model.work_s.array(d)[-1] for d in self.leads]
        rate = math.fsum(n / whole for n, whole in zip(self.number.tolist(), wholes, strict=True) if whole)
        return 1 / rate if rate and all(wholes) else 0.0

    def best(self, width: int, probes: int, tolerance: float, deadline: float = math.inf) -> Placement | None:
        """The best plan found in that many bisections of the limit, or until the deadline, or None."""
        low = self.volume_s()
        high, placement = math.inf, None
        step = 0.01
        while placement is None and step < 40 and low > 0 and probes > 0 and time.perf_counter() < deadline:
            placement = self.plan(low * (1 + step), width)
            if placement is None:
                low *= 1 + step
                step *= 2
            probes -= 1
        if placement is None:
            placement = self.plan(math.inf, width)
        if placement is None:
            return None
        high = bottleneck_s(self.model, placement)
        while probes > 0 and high > low * (1 + tolerance) and time.perf_counter() < deadline:
            middle = (low + high) / 2
            better = self.plan(middle, width)
            if better is None:
                low = middle
            else:
                placement, high = better, min(middle, bottleneck_s(self.model, better))
            probes -= 1
        return placement

    def plan(self, limit_s: float, width: int) -> Placement | None:
        """A plan whose stages all take at most the limit, or None: not found."""
        model = self.model
        weight = self.work if limit_s < math.inf else self.bytes + self.work
        earliest = self._within(limit_s)
        if not model.unlimited:
            earliest = np.maximum(earliest, self._fitting(1))
        price = (weight - weight[earliest]).max(axis=1)
        slack = float(price @ self.number) - weight[-1] * (1 - 1e-12)
        states = _BeamStates(
            np.array([model.layers]),
            np.zeros((1, len(self.members)), dtype=np.intp),
            np.zeros(1),
            np.zeros(1, dtype=np.uint64),
        )
        choices: list[tuple[Ints, Ints, Ints]] = []
        for stages in range(1, model.max_stages + 1):
            start = earliest[:, states.at].T
            if self.deep and not model.unlimited:
                start = np.maximum(start, self._fitting(model.least_in_flight(0, stages))[:, states.at].T)
            allowed = (start < states.at[:, None]) & (states.used < self.number)
            if stages == 1:
                allowed &= self.last
            done = np.argwhere(allowed & (start == 0))
            if len(done):
                placement = self._traced(choices, int(done[0, 0]), int(done[0, 1]))
                return placement if model.is_allowed(placement) else None
            states = self._next(states, (start, allowed), (weight, price, slack, width), choices)
            if not len(states.at):
                return None
        return None

    def _next(
        self,
        states: _BeamStates,
        options: tuple[Ints, npt.NDArray[np.bool_]],
        terms: tuple[Array, Array, float, int],
        choices: list[tuple[Ints, Ints, Ints]],
    ) -> _BeamStates:
        start, allowed = options
        weight, price, slack, width = terms
        waste = states.waste[:, None] + price - weight[states.at][:, None] + weight[start]
        waste = np.where(allowed & (waste <= slack), waste, math.inf).ravel()
        chosen = np.flatnonzero(waste < math.inf)
        if len(chosen) > 4 * width:
            chosen = chosen[np.argpartition(waste[chosen], 4 * width)[: 4 * width]]
        chosen = chosen[np.argsort(waste[chosen], kind="stable")]
        parent, group = np.divmod(chosen, len(self.members))
        key = states.key[parent] + self.hashes[group]
        keep = np.sort(np.unique(key, return_index=True)[1])[:width]
        parent, group = parent[keep], group[keep]
        used = states.used[parent]
        used[np.arange(len(keep)), group] += 1
        at = start[parent, group]
        if not self.first.all():
            open_ = (used < self.number)[:, self.first].any(axis=1)
            parent, group, keep = parent[open_], group[open_], keep[open_]
            used, at = used[open_], at[open_]
        choices.append((parent, group, at))
        return _BeamStates(at, used, waste[chosen[keep]], key[keep])

    def _within(self, limit_s: float) -> Ints:
        """By group and stop, the first layer of the longest range within the limit."""
        layers = self.model.layers
        floor = np.where(self.first, 0, 1)[:, None]
        if limit_s == math.inf:
            return np.repeat(floor, layers + 1, axis=1)
        if self.related:
            wanted = self.flops - self.speeds[:, None] * (limit_s * LIMIT_ROUNDING)
            first = self.flops.searchsorted(wanted.ravel()).reshape(wanted.shape)
        else:
            rows = [self.model.work_s.array(d) for d in self.leads]
            first = np.array([row.searchsorted(row - limit_s * LIMIT_ROUNDING) for row in rows])
        return np.maximum(first, floor)

    def _fitting(self, in_flight: int) -> Ints:
        """By group and stop, the first layer of the longest range that fits with that many in flight."""
        if in_flight not in self._fitting_starts:
            self._fitting_starts[in_flight] = self._fits(in_flight)
        return self._fitting_starts[in_flight]

    def _fits(self, in_flight: int) -> Ints:
        layers = self.model.layers
        need = self.memory.state + in_flight * self.memory.activation
        stop = np.arange(layers + 1)
        out = np.zeros((len(self.members), layers + 1), dtype=np.intp)
        for g, limit in enumerate(self.available.tolist()):
            if limit == math.inf:
                continue
            start = np.minimum(need.searchsorted(need - limit * LIMIT_ROUNDING), stop)
            for tries in range(layers + 1):
                fixed, kept = self.memory.need(start, stop)
                over = (fixed + in_flight * kept > limit) & (start < stop)
                if not over.any():
                    break
                start = np.where(over, stop if tries > MOST_SHIFTS else start + 1, start)
            out[g] = start
        return out

    def _traced(self, choices: list[tuple[Ints, Ints, Ints]], state: int, group: int) -> Placement:
        groups, starts = [group], [0]
        for parents, chosen, at in reversed(choices):
            groups.append(int(chosen[state]))
            starts.append(int(at[state]))
            state = int(parents[state])
        free = [group[::-1] for group in self.members]
        stops = [*starts[1:], self.model.layers]
        return tuple(
            StageAssignment(free[g].pop(), p, q) for g, p, q in zip(groups, starts, stops, strict=True)
        )
