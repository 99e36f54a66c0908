"""A problem's numbers, added up anew from its record for ``verify``: times, memory, pins, kinds of devices.

Boundaries are 0 … L; a stage holds the layers between two of them. ``work(d)[i]`` is the seconds of layers
[0, i). Sums are made in extended precision, then rounded: a stage's time is right to
about 1e-16 of the whole model's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skyctl.records.problem import Problem
from skyctl.schedule.actions import ZERO_BUBBLE, least_in_flight

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MEMORY_ROUNDING = 1e-12
"""Relative: a need this little above what there is fits, for sums in another order round differently."""


class DeviceKind(NamedTuple):
    """Devices that can't be told apart where links do not matter; ``room_bytes``: memory less reserved."""

    members: tuple[int, ...]
    room_bytes: float
    may_be_first: bool
    may_be_last: bool

    @property
    def device(self) -> int:
        """The first of its devices, which stands for all."""
        return self.members[0]


class ProblemData:
    """One problem as arrays. Read only.

    Memory is what a stage needs at least: under zero-bubble with no weight gradients behind; where stages may
    recompute, with their layers' inputs kept only and nothing put off, at the times of those that do not. So
    what has no place here has none at all; what has one may have none (``loose``).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem = problem.with_steps_spread()
        self.layers = len(problem.layers)
        self.devices = len(problem.devices)
        self.microbatches = problem.microbatches
        self.most_stages = min(self.layers, self.devices)
        self._flops = np.array([layer.flops for layer in problem.layers])
        self.loose = problem.recompute
        self.split = problem.schedule == ZERO_BUBBLE
        state = np.array([layer.state_bytes for layer in problem.layers])
        if self.split and not self.loose:
            state += np.array([layer.deferred_bytes for layer in problem.layers])
        self.state = sums(state)
        activation = np.array([layer.activation_bytes for layer in problem.layers])
        if self.loose:
            before = [layer.output_bytes for layer in problem.layers[:-1]]
            activation[1:] = np.minimum(activation[1:], before)
        self.kept = activation
        self.activation = sums(activation)
        self.workspace = np.array([layer.workspace_bytes for layer in problem.layers])
        self.received = np.array([0.0, *(layer.output_bytes for layer in problem.layers)])
        self.received[[0, -1]] = 0.0  # per boundary, one way
        whole = float(self.state[-1] + self.microbatches * self.activation[-1])
        self.room = [
            math.inf
            if device.memory_bytes is None
            else device.memory_bytes * (1 + MEMORY_ROUNDING) - device.reserved_bytes + 2e-15 * whole
            for device in problem.devices
        ]
        self.limited = any(room < math.inf for room in self.room)
        self.windowed = self.limited and problem.receive_window > 0 and bool(self.received.any())
        self.kinds = self._kinds()
        self._tables: list[Array] = []

    def _kinds(self) -> tuple[DeviceKind, ...]:
        groups: dict[object, list[int]] = {}
        for d, device in enumerate(self.problem.devices):
            times = self.problem.times.get(device.id)
            time = device.flops_per_s if times is None else (
                times.forward_s, times.backward_s, times.split_s
            )  # fmt: skip
            key = (time, self.room[d], self.may_be_first(d), self.may_be_last(d))
            groups.setdefault(key, []).append(d)
        return tuple(
            DeviceKind(tuple(g), self.room[g[0]], self.may_be_first(g[0]), self.may_be_last(g[0]))
            for g in groups.values()
        )

    def may_be_first(self, device: int) -> bool:
        """Whether a pin lets it hold the first stage."""
        names = self.problem.first_stage
        return names is None or self.problem.devices[device].id in names

    def may_be_last(self, device: int) -> bool:
        """Whether a pin lets it hold the last stage."""
        names = self.problem.last_stage
        return names is None or self.problem.devices[device].id in names

    def least_in_flight(self, stages_to_end: int) -> int:
        """The (least) number in flight of a stage with that many stages from it to the end."""
        return least_in_flight(self.problem.schedule, 0, stages_to_end, self.microbatches)

    def columns(self, device: int) -> tuple[Array, Array, Array]:
        """(forward, backward, optimizer) seconds of every layer."""
        entry = self.problem.devices[device]
        times = self.problem.times.get(entry.id)
        if times is not None:
            cut = times.split_s if self.split and times.split_s is not None else times.backward_s
            return np.array(times.forward_s), np.array(cut), np.array(times.optimizer_s)
        with np.errstate(over="ignore"):  # see ``finite``
            whole = self._flops / entry.flops_per_s
        return whole / 3, whole - whole / 3, np.zeros_like(whole)

    def overhead_table(self, device: int) -> Array:
        """[start, stop] → seconds that a stage's forward, and its backward, takes besides its layers."""
        entry = self.problem.devices[device]
        at = np.arange(self.layers + 1)
        neighbours = np.add.outer((at > 0).astype(float), (at < self.layers).astype(float))
        out: Array = (entry.handling_s + entry.action_s) / 2 + entry.neighbour_s / 2 * neighbours
        return out

    def stage_overhead_s(self, device: int, start: int, stop: int) -> float:
        """Seconds of one stage's forward, and of its backward, besides its layers."""
        entry = self.problem.devices[device]
        neighbours = (start > 0) + (stop < self.layers)
        return (entry.handling_s + entry.action_s) / 2 + entry.neighbour_s / 2 * neighbours

    def separate(self) -> tuple[ProblemData, ProblemData]:
        """The problem where nobody recomputes; and where everybody does, as far as memory goes."""
        layers = tuple(
            layer.model_copy(
                update={
                    "activation_bytes": float(kept),
                    "workspace_bytes": layer.activation_bytes + layer.workspace_bytes,
                    "deferred_bytes": 0.0,
                }
            )
            for layer, kept in zip(self.problem.layers, self.kept, strict=True)
        )
        plain = self.problem.model_copy(update={"recompute": False})
        return ProblemData(plain), ProblemData(plain.model_copy(update={"layers": layers}))

    def weights(self, device: int) -> Array:
        """Seconds of every layer's weight gradients that may be put off (part of its backward)."""
        times = self.problem.times.get(self.problem.devices[device].id)
        if not self.split or times is None or times.weight_s is None:
            return np.zeros(self.layers)
        return np.array(times.weight_s)

    def seconds(self, device: int) -> Array:
        """Forward and backward of every layer, together."""
        forward, backward, _ = self.columns(device)
        return forward + backward

    def finite(self) -> bool:
        """Whether all its times and bytes can be added up."""
        with np.errstate(over="ignore", invalid="ignore"):
            totals = [float(self.seconds(kind.device).sum()) for kind in self.kinds]
            totals += [float(x[-1]) for x in (self.state, self.microbatches * self.activation)]
            return all(math.isfinite(total * self.microbatches) for total in totals)

    def work(self, device: int) -> Array:
        """Prefix sums of ``seconds``."""
        return sums(self.seconds(device))

    def fixed_bytes(self, start: int, stops: Ints, in_flight: int) -> Array:
        """The bytes that [start, stop) needs for each of these stops, workspace left out."""
        need: Array = self.state[stops] - self.state[start]
        need += in_flight * (self.activation[stops] - self.activation[start])
        need += self.problem.receive_window * (self.received[start] + self.received[stops])
        return need

    def need_bytes(self, start: int, stop: int, in_flight: int) -> float:
        """The bytes that [start, stop) needs on any device, its reserved bytes left out."""
        fixed = float(self.fixed_bytes(start, np.array([stop]), in_flight)[0])
        return fixed + float(self.workspace[start:stop].max())

    def stops(self, kind: DeviceKind, start: int, in_flight: int, below_s: float, work: Array) -> Bools:
        """Per boundary, whether [start, it) takes less than ``below_s`` and fits."""
        out = np.zeros(self.layers + 1, dtype=bool)
        far = int(np.searchsorted(work, work[start] + below_s, side="left"))
        ends = np.arange(start + 1, min(far, self.layers + 1))
        ok = work[ends] - work[start] < below_s
        if kind.room_bytes < math.inf:
            need = self.fixed_bytes(start, ends, in_flight)
            need += np.maximum.accumulate(self.workspace[start : start + len(ends)])
            ok &= need <= kind.room_bytes
        out[ends] = ok
        return self._pinned(kind, start, out)

    def _pinned(self, kind: DeviceKind, start: int, ends: Bools) -> Bools:
        if start == 0 and not kind.may_be_first:
            ends[:] = False
        if not kind.may_be_last:
            ends[self.layers] = False
        return ends

    def farthest(self, kind: DeviceKind, in_flight: int, below_s: float, work: Array) -> Ints:
        """Per start (0 … L − 1), the last boundary with less than ``below_s`` that fits (start: none).

        It leaves out what waits in a receive window, which only lets more fit. So the result never shrinks
        from one start to the next, pins apart.
        """
        begins = np.arange(self.layers)
        far = np.searchsorted(work, work[:-1] + below_s, side="left") - 1
        far = np.clip(far, begins, self.layers)
        if kind.room_bytes < math.inf:
            far = self._within_memory(begins, far, in_flight, kind.room_bytes)
        if not kind.may_be_last:
            far = np.maximum(begins, np.minimum(far, self.layers - 1))
        if not kind.may_be_first:
            far[0] = 0
        return far

    def _within_memory(self, begins: Ints, far: Ints, in_flight: int, room: float) -> Ints:
        base = self.state + in_flight * self.activation
        if not self.workspace.any():
            most = np.searchsorted(base, base[:-1] + room, side="right") - 1
            return np.clip(np.minimum(far, most), begins, None)
        low, high = begins.copy(), far.copy()  # low fits (or is empty), bisected
        while (low < high).any():
            middle = (low + high + 1) // 2
            need = base[middle] - base[begins] + self._largest_workspace(begins, middle)
            fits = need <= room
            low = np.where((low < high) & fits, middle, low)
            high = np.where((low < high) & ~fits, middle - 1, high)
        return low

    def _largest_workspace(self, begins: Ints, ends: Ints) -> Array:
        """Of [begin, end) each; empty ranges count as one layer."""
        if not self._tables:
            self._tables = [self.workspace]
            while 2 ** len(self._tables) <= self.layers:
                below, half = self._tables[-1], 2 ** (len(self._tables) - 1)
                self._tables.append(np.maximum(below[:-half], below[half:]))
        lengths = np.maximum(1, ends - begins)
        levels = np.frexp(lengths.astype(float))[1] - 1
        out = np.empty(len(begins))
        for level in np.unique(levels):
            at = levels == level
            table = self._tables[level]
            out[at] = np.maximum(table[begins[at]], table[begins[at] + lengths[at] - 2**level])
        return out


def sums(values: Array) -> Array:
    """Prefix sums from 0, shape (n + 1,): [0, v0, v0 + v1, …]."""
    out = np.zeros(len(values) + 1, dtype=np.longdouble)
    np.cumsum(values.astype(np.longdouble), out=out[1:])
    with np.errstate(over="ignore"):
        return out.astype(np.float64)


# The part of a model that a device can hold within seconds and bytes, for proofs about trips.

ROUND = 1e-9


class DeviceBudget:
    """The part of the model (1 in all) that a device can hold within seconds and memory.

    A layer counts for the least share that it has of any device's time for everything. ``rate``: the most a
    device holds a second; ``least``: the least seconds of a stage, layers that count for little left out, and
    ``small_stages`` what that may be wrong by for all of these; ``forward``, ``backward``: least shares.
    """

    def __init__(self, facts: ProblemData, most_s: float) -> None:
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

    def most(self, device: int, in_flight: int, seconds: Array) -> Array:
        """The most that a stage of at most so many seconds holds there."""
        kind = self._kinds[device]
        key = (kind.device, in_flight if self.facts.limited else 1)
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        times, held = self._tables[key]
        return held[np.searchsorted(times, seconds * (1 + 1e-12), side="right")]

    def _table(self, device: int, in_flight: int) -> tuple[Array, Array]:
        """(seconds of every range that fits, ascending; the most held within each, 0 first)."""
        work = self.facts.work(device)
        starts, stops = self._ranges(device, in_flight, work)
        value = sums(self.value)
        times, held = work[stops] - work[starts], value[stops] - value[starts]
        order = np.argsort(times, kind="stable")
        return times[order], np.concatenate([[0.0], np.maximum.accumulate(held[order])])

    def _ranges(self, device: int, in_flight: int, work: Array) -> tuple[Ints, Ints]:
        """(starts, stops) of every range that fits."""
        kind, within = self._kinds[device], self.most_s * (1 + 1e-9)
        each = np.arange(self.facts.layers)
        if self.facts.windowed:
            by_start = [np.flatnonzero(self.facts.stops(kind, int(p), in_flight, within, work)) for p in each]
            return np.repeat(each, [len(stops) for stops in by_start]), np.concatenate(by_start)
        count = self.facts.farthest(kind, in_flight, within, work) - each
        starts = np.repeat(each, count)
        return starts, starts + 1 + np.arange(len(starts)) - np.repeat(np.cumsum(count) - count, count)


# The answer of a proof method.


@dataclass(frozen=True)
class Proof:
    """``holds`` True: no plan is below the limit; False: one is; None: this method can't tell."""

    holds: bool | None
    detail: str
