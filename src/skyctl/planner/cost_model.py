"""The cost model: one problem as plain numbers and prefix sums, which every strategy computes with.

Ranges of layers are half-open; devices are indices in the problem's order. A candidate plan is a
``Placement``: its stages in pipeline order, each a range of layers on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skyctl.planner.link_tables import LinkCost, LinkTables
from skyctl.planner.stage_memory import ROUNDING, kept_bytes
from skyctl.records.problem import Layer, LayerTimes, Problem
from skyctl.schedule.actions import EAGER, ZERO_BUBBLE, least_in_flight
from skyctl.schedule.step_times import MessageTimes

Array = npt.NDArray[np.float64]

MANY_SUMS = 500_000
"""Stages × layers from which prefix sums are not kept as lists."""
SUM_ROUNDING = 2e-15
"""How far a difference of prefix sums may be off, relative to the sum over all layers."""


class StageAssignment(NamedTuple):
    """Layers [start, stop) on device ``device`` (its index)."""

    device: int
    start: int
    stop: int


Placement = tuple[StageAssignment, ...]
"""A candidate plan's stages, in pipeline order."""


def consecutive(sizes: Iterable[tuple[int, int]]) -> Placement:
    """The placement of devices with that many layers each, (device, number of layers) in pipeline order."""
    stages = []
    start = 0
    for device, size in sizes:
        stages.append(StageAssignment(device, start, start + size))
        start += size
    return tuple(stages)


class PrefixSums:
    """Prefix sums of the layers' seconds on each device, computed on demand: [d][i] covers layers [0, i)."""

    def __init__(self, devices: int, layers: int, layers_of: Callable[[int], Array]) -> None:
        self._layers = layers
        self._layers_of = layers_of
        self._lists: list[list[float] | None] = [None] * devices

    def __getitem__(self, device: int) -> list[float]:
        values = self._lists[device]
        if values is None:
            values = self._lists[device] = self.array(device).tolist()
        return values

    def __len__(self) -> int:
        return len(self._lists)

    def __iter__(self) -> Iterator[list[float]]:
        return (self[d] for d in range(len(self._lists)))

    def of(self, placement: Placement) -> list[float]:
        """Seconds of each stage on its device; lists are kept only where they stay small."""
        if len(placement) * self._layers < MANY_SUMS:
            return [self[d][q] - self[d][p] for d, p, q in placement]
        arrays = ((self.array(d), p, q) for d, p, q in placement)
        return [float(array[q] - array[p]) for array, p, q in arrays]

    def array(self, device: int) -> Array:
        """One device's prefix sums, shape (layers + 1,), computed anew: for problems too large for lists."""
        layers = self._layers_of(device)
        out = np.zeros(len(layers) + 1)
        np.cumsum(layers, out=out[1:])
        return out


def _range_maxima(values: Sequence[float]) -> list[list[float]]:
    """A sparse table of range maxima: level l, entry i is the largest of [i, i + 2^l)."""
    tables = [list(values)]
    while 2 ** len(tables) <= len(values):
        below, half = tables[-1], 2 ** (len(tables) - 1)
        tables.append([max(below[i], below[i + half]) for i in range(len(below) - half)])
    return tables


def _range_maximum(tables: list[list[float]], start: int, stop: int) -> float:
    level = (stop - start).bit_length() - 1
    table = tables[level]
    return max(table[start], table[stop - (1 << level)])


class _RecomputeMemory:
    """Memory of stages that recompute: they keep only their layers' inputs."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.state_bytes = [0.0, *accumulate(layer.state_bytes for layer in layers)]
        self.kept_bytes = [0.0, *accumulate(kept_bytes(layers))]
        self.peak_bytes = _range_maxima([layer.activation_bytes + layer.workspace_bytes for layer in layers])

    def need_bytes(self, start: int, stop: int, in_flight: int) -> float:
        """Bytes of layers [start, stop), receive windows left out."""
        need = self.state_bytes[stop] - self.state_bytes[start]
        need += in_flight * (self.kept_bytes[stop] - self.kept_bytes[start])
        return need + _range_maximum(self.peak_bytes, start, stop)


class CostModel:
    """Prefix sums and limits of one problem. Read only.

    Attributes:
        layers, devices: how many there are.
        links: tables of them.
        by_iteration: whether the objective is the whole step, not the slowest stage.
        chooses_depth: whether the microbatches in flight are the plan's choice.
        defers_weights: whether weight gradients are deferred (``zero-bubble``); ``state_bytes`` then includes
            the least that keeps.
        may_recompute: whether stages may recompute; ``fits`` then tries both ways.
        overhead_s: by device, seconds each forward and each backward takes besides its layers.
        neighbour_overhead_s: by device, as many more for each neighbouring stage.
        forward_s, backward_s, optimizer_s, work_s, weight_s: layer times by device; ``work_s`` is forward and
            backward together, ``weight_s`` the part of the backward that can be deferred.
        timing_class: by device a number, equal for devices whose layers all take the same time.
        state_bytes, activation_bytes, deferred_bytes: prefix sums over the layers.
        output_bytes: by layer.
        available_bytes: by device, infinite where memory is not limited.
        may_be_first, may_be_last: the devices that may hold the first and the last stage.
    """

    def __init__(self, problem: Problem, links: LinkTables | None = None) -> None:
        self.problem = problem
        self.links = LinkTables(problem) if links is None else links
        self.layers = len(problem.layers)
        self.devices = len(problem.devices)
        self.microbatches = problem.microbatches
        self.schedule = problem.schedule
        self.defers_weights = problem.schedule == ZERO_BUBBLE
        self.chooses_depth = self.defers_weights or problem.schedule == EAGER
        self.may_recompute = problem.recompute
        self.by_iteration = problem.objective == "iteration"
        self.ids = [device.id for device in problem.devices]
        self._index = {name: i for i, name in enumerate(self.ids)}
        spread = problem.with_steps_spread()
        self.overhead_s = [(device.handling_s + device.action_s) / 2 for device in spread.devices]
        self._message_overhead_s = [device.handling_s / 2 for device in spread.devices]
        self.neighbour_overhead_s = [device.neighbour_s / 2 for device in spread.devices]
        self.has_overhead = any(self.overhead_s) or any(self.neighbour_overhead_s)
        self._add_times(spread.times)
        self._add_memory()
        self.may_be_first = self._pinned(problem.first_stage)
        self.may_be_last = self._pinned(problem.last_stage)
        self.max_stages = min(self.layers, self.devices)

    def with_microbatches(self, microbatches: int) -> CostModel:
        """The same problem with another number of microbatches a step; tables are shared with this one."""
        other = copy(self)
        other.problem = self.problem.model_copy(update={"microbatches": microbatches})
        other.microbatches = microbatches
        return other

    def _add_times(self, known_times: Mapping[str, LayerTimes]) -> None:
        times = [known_times.get(device.id) for device in self.problem.devices]
        flops = np.array([layer.flops for layer in self.problem.layers])

        def column(field: str, share: Callable[[Array], Array]) -> Callable[[int], Array]:
            def of(d: int) -> Array:
                layer_times = times[d]
                if layer_times is not None and field == "backward_s" and self.defers_weights:
                    return np.array(
                        layer_times.backward_s if layer_times.split_s is None else layer_times.split_s
                    )
                if layer_times is not None:
                    return np.array(getattr(layer_times, field))
                return share(flops / self.problem.devices[d].flops_per_s)

            return of

        forward = column("forward_s", lambda whole: whole / 3)
        backward = column("backward_s", lambda whole: whole - whole / 3)
        optimizer = column("optimizer_s", np.zeros_like)
        self.forward_s = PrefixSums(self.devices, self.layers, forward)
        self.backward_s = PrefixSums(self.devices, self.layers, backward)
        self.optimizer_s = PrefixSums(self.devices, self.layers, optimizer)
        self.work_s = PrefixSums(self.devices, self.layers, lambda d: forward(d) + backward(d))
        self.weight_s = PrefixSums(self.devices, self.layers, self._weight_of(times))
        classes: dict[object, int] = {}
        self.timing_class = [
            classes.setdefault(device.flops_per_s if layer_times is None else layer_times, len(classes))
            for device, layer_times in zip(self.problem.devices, times, strict=True)
        ]

    def _weight_of(self, times: Sequence[LayerTimes | None]) -> Callable[[int], Array]:
        """Seconds of weight gradients that can be deferred: only under zero-bubble, and only where known."""

        def of(d: int) -> Array:
            layer_times = times[d]
            if not self.defers_weights or layer_times is None or layer_times.weight_s is None:
                return np.zeros(self.layers)
            return np.array(layer_times.weight_s)

        return of

    def _add_memory(self) -> None:
        layers = self.problem.layers
        deferred = [layer.deferred_bytes if self.defers_weights else 0.0 for layer in layers]
        self.deferred_bytes = [0.0, *accumulate(deferred)]
        states = (layer.state_bytes + least for layer, least in zip(layers, deferred, strict=True))
        self.state_bytes = [0.0, *accumulate(states)]
        self.activation_bytes = [0.0, *accumulate(layer.activation_bytes for layer in layers)]
        self.output_bytes = [layer.output_bytes for layer in layers]
        self.receive_window = self.problem.receive_window
        # what a range needs is a difference of sums over all layers, and is rounded as those are
        rounded = SUM_ROUNDING * (self.state_bytes[-1] + self.microbatches * self.activation_bytes[-1])
        self.available_bytes = [
            math.inf
            if d.memory_bytes is None
            else d.memory_bytes * (1 + ROUNDING) - d.reserved_bytes + rounded
            for d in self.problem.devices
        ]
        self.unlimited = all(x == math.inf for x in self.available_bytes)
        self._workspace_bytes = _range_maxima([layer.workspace_bytes for layer in layers])
        self._recomputed = _RecomputeMemory(layers)

    def _pinned(self, names: Sequence[str] | None) -> frozenset[int]:
        return frozenset(range(self.devices)) if names is None else frozenset(self._index[n] for n in names)

    def index(self, device: str) -> int:
        """A device's index by its id; KeyError when unknown."""
        return self._index[device]

    def link_cost(self, source: int, target: int) -> LinkCost:
        """The cost of messages from one device to another; nothing if no link is given."""
        return self.links.message_cost(source, target)

    def occupancy_s(self, source: int, target: int, boundary: int) -> tuple[float, float]:
        """Seconds one message takes on its slowest resource, and its latency in seconds.

        ``boundary``: the first layer of the later stage.
        """
        cost = self.link_cost(source, target)
        return self.output_bytes[boundary - 1] * cost.slowest_s_per_byte, cost.latency_s

    def message_times(self, source: int, target: int, boundary: int) -> MessageTimes:
        """One message over a boundary (the first layer of the later stage), as the simulator takes it."""
        cost = self.link_cost(source, target)
        size = self.output_bytes[boundary - 1]
        shared = tuple((number, size * rate) for number, rate in cost.shared)
        return MessageTimes(size * cost.seconds_per_byte, cost.latency_s, shared)

    def workspace_bytes(self, start: int, stop: int) -> float:
        """The largest workspace of layers [start, stop)."""
        return _range_maximum(self._workspace_bytes, start, stop)

    def need_bytes(
        self, start: int, stop: int, in_flight: int, deferred: int = 0, *, recompute: bool = False
    ) -> float:
        """Bytes that layers [start, stop) need on any device, reserved bytes left out (contract: Memory).

        Args:
            in_flight: microbatches kept between forward and backward.
            deferred: by how many microbatches weight gradients follow their backward.
        """
        if recompute:
            need = self._recomputed.need_bytes(start, stop, in_flight)
        else:
            need = self.state_bytes[stop] - self.state_bytes[start]
            need += in_flight * (self.activation_bytes[stop] - self.activation_bytes[start])
            need += self.workspace_bytes(start, stop)
            if deferred:
                need += deferred * (self.deferred_bytes[stop] - self.deferred_bytes[start])
        if self.receive_window:
            ahead = self.output_bytes[start - 1] if start else 0.0
            back = self.output_bytes[stop - 1] if stop < self.layers else 0.0
            need += self.receive_window * (ahead + back)
        return need

    def device_bytes(
        self, stage: StageAssignment, in_flight: int, deferred: int = 0, *, recompute: bool = False
    ) -> float:
        """``need_bytes`` of a stage, with what is taken of its device's memory anyway."""
        need = self.need_bytes(stage.start, stage.stop, in_flight, deferred, recompute=recompute)
        return self.problem.devices[stage.device].reserved_bytes + need

    def memory_tables(self, *, recompute: bool) -> tuple[list[float], list[float], list[float]]:
        """Bytes by layer: prefix sums of what is always held, and per microbatch in flight; peak use."""
        if recompute:
            recomputed = self._recomputed
            return recomputed.state_bytes, recomputed.kept_bytes, recomputed.peak_bytes[0]
        return self.state_bytes, self.activation_bytes, self._workspace_bytes[0]

    def fits(
        self,
        device: int,
        start: int,
        stop: int,
        in_flight: int,
        deferred: int = 0,
        recompute: bool | None = None,
    ) -> bool:
        """Whether layers [start, stop) fit on a device; ``recompute`` None: in whichever way is allowed."""
        limit = self.available_bytes[device]
        if limit == math.inf:
            return True
        if not recompute and self.need_bytes(start, stop, in_flight, deferred) <= limit:
            return True
        if recompute is False or not self.may_recompute:
            return False
        return self.need_bytes(start, stop, in_flight, recompute=True) <= limit

    def least_in_flight(self, stage: int, stages: int) -> int:
        """The fewest microbatches stage ``stage`` (from 0) of ``stages`` may keep in flight."""
        return least_in_flight(self.schedule, stage, stages, self.microbatches)

    def busy_s(self, device: int, start: int, stop: int) -> float:
        """Seconds of one microbatch's forward and backward through layers [start, stop)."""
        work = self.work_s[device]
        return work[stop] - work[start]

    def message_overhead_s(self, device: int, start: int, stop: int) -> float:
        """The part of ``stage_overhead_s`` that a rank counts as messages, not as forward or backward."""
        return self._message_overhead_s[device] + self._neighbours_s(device, start, stop)

    def stage_overhead_s(self, device: int, start: int, stop: int) -> float:
        """Seconds that a stage's forward, and its backward, takes besides its layers."""
        return self.overhead_s[device] + self._neighbours_s(device, start, stop)

    def _neighbours_s(self, device: int, start: int, stop: int) -> float:
        return self.neighbour_overhead_s[device] * ((start > 0) + (stop < self.layers))

    def is_allowed(self, placement: Placement) -> bool:
        """Whether every stage fits in memory with the least in flight, and the pins hold."""
        if placement[0].device not in self.may_be_first or placement[-1].device not in self.may_be_last:
            return False
        count = len(placement)
        return all(
            self.fits(d, p, q, self.least_in_flight(s, count)) for s, (d, p, q) in enumerate(placement)
        )
