"""A problem as plain numbers and prefix sums: what every strategy computes with.

A stage's range is half-open; devices are their indices in the problem's order. A candidate plan is a tuple of
``Piece`` (device, start, stop) in pipeline order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skyctl.planner.memory import ROUNDING, kept_bytes
from skyctl.records.problem import Layer, LayerTimes, Problem
from skyctl.schedule.actions import EAGER, ZERO_BUBBLE, in_flight
from skyctl.schedule.simulate import Hop

Array = npt.NDArray[np.float64]

MANY = 500_000
"""Pieces × layers from which prefix sums are not kept as lists."""
SUMS = 2e-15
"""Relative: what differences of prefix sums may be off by, in terms of the whole."""


class Piece(NamedTuple):
    """Layers [start, stop) on device ``device`` (its index)."""

    device: int
    start: int
    stop: int


class Way(NamedTuple):
    """From one device to another: seconds of latency, seconds a byte on the link, and on each shared one."""

    latency_s: float
    seconds_per_byte: float
    shared: tuple[tuple[int, float], ...]


NO_WAY = Way(0.0, 0.0, ())


class Sums:
    """Per device the prefix sums of its layers' seconds, made when asked for: [d][i] is layers [0, i)."""

    def __init__(self, devices: int, layers: int, layers_of: Callable[[int], Array]) -> None:
        self._layers = layers
        self._layers_of = layers_of
        self._lists: list[list[float] | None] = [None] * devices

    def __getitem__(self, device: int) -> list[float]:
        known = self._lists[device]
        if known is None:
            known = self._lists[device] = self.array(device).tolist()
        return known

    def __len__(self) -> int:
        return len(self._lists)

    def __iter__(self) -> Iterator[list[float]]:
        return (self[d] for d in range(len(self._lists)))

    def of(self, pieces: Sequence[Piece]) -> list[float]:
        """Seconds of each piece on its device; lists are kept only where they stay small."""
        if len(pieces) * self._layers < MANY:
            return [self[d][q] - self[d][p] for d, p, q in pieces]
        arrays = ((self.array(d), p, q) for d, p, q in pieces)
        return [float(array[q] - array[p]) for array, p, q in arrays]

    def array(self, device: int) -> Array:
        """The same numbers, shape (layers + 1,); nothing is kept: for problems too large for lists."""
        layers = self._layers_of(device)
        out = np.zeros(len(layers) + 1)
        np.cumsum(layers, out=out[1:])
        return out


def _maxima(values: Sequence[float]) -> list[list[float]]:
    """Sparse table of range maxima: level l, entry i is the largest of [i, i + 2^l)."""
    tables = [list(values)]
    while 2 ** len(tables) <= len(values):
        below, half = tables[-1], 2 ** (len(tables) - 1)
        tables.append([max(below[i], below[i + half]) for i in range(len(below) - half)])
    return tables


def _largest(tables: list[list[float]], start: int, stop: int) -> float:
    level = (stop - start).bit_length() - 1
    table = tables[level]
    return max(table[start], table[stop - (1 << level)])


class _Recomputed:
    """What stages need that keep their layers' inputs only."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.state = [0.0, *accumulate(layer.state_bytes for layer in layers)]
        self.kept = [0.0, *accumulate(kept_bytes(layers))]
        self.peak = _maxima([layer.activation_bytes + layer.workspace_bytes for layer in layers])

    def need_bytes(self, start: int, stop: int, flying: int) -> float:
        """Without a receive window."""
        need = self.state[stop] - self.state[start] + flying * (self.kept[stop] - self.kept[start])
        return need + _largest(self.peak, start, stop)


class Model:
    """Prefix sums and limits of one problem. Read only.

    ``time_kind``: per device a number, the same for devices whose layers all take the same time. ``eager``:
    the numbers in flight are the plan's choice. ``zero``: weight gradients are put off; ``state`` holds then
    what that keeps at least. ``mixed``: each stage may recompute, and ``fits`` says whether it fits so or so.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.layers = len(problem.layers)
        self.devices = len(problem.devices)
        self.microbatches = problem.microbatches
        self.schedule = problem.schedule
        self.zero = problem.schedule == ZERO_BUBBLE
        self.eager = self.zero or problem.schedule == EAGER
        self.mixed = problem.recompute
        self.by_iteration = problem.objective == "iteration"
        self.ids = [device.id for device in problem.devices]
        self._index = {name: i for i, name in enumerate(self.ids)}
        self.handling = [(device.handling_s + device.action_s) / 2 for device in problem.devices]
        """Seconds that each forward and each backward takes beside its layers, by device."""
        self._between = [device.handling_s / 2 for device in problem.devices]
        self.neighbour = [device.neighbour_s / 2 for device in problem.devices]
        """As many more for each stage next to it."""
        self.handled = any(self.handling) or any(self.neighbour)
        self._times()
        self._sizes()
        self._ways()
        self.first = self._pins(problem.first_stage)
        self.last = self._pins(problem.last_stage)
        self.max_stages = min(self.layers, self.devices)

    def _times(self) -> None:
        times = [self.problem.times.get(device.id) for device in self.problem.devices]
        flops = np.array([layer.flops for layer in self.problem.layers])

        def column(field: str, share: Callable[[Array], Array]) -> Callable[[int], Array]:
            def of(d: int) -> Array:
                known = times[d]
                if known is not None and field == "backward_s" and self.zero:
                    return np.array(known.backward_s if known.split_s is None else known.split_s)
                if known is not None:
                    return np.array(getattr(known, field))
                return share(flops / self.problem.devices[d].flops_per_s)

            return of

        forward = column("forward_s", lambda whole: whole / 3)
        backward = column("backward_s", lambda whole: whole - whole / 3)
        optimizer = column("optimizer_s", np.zeros_like)
        self.forward = Sums(self.devices, self.layers, forward)
        self.backward = Sums(self.devices, self.layers, backward)
        self.optimizer = Sums(self.devices, self.layers, optimizer)
        self.work = Sums(self.devices, self.layers, lambda d: forward(d) + backward(d))
        self.weight = Sums(self.devices, self.layers, self._weight_of(times))
        kinds: dict[object, int] = {}
        self.time_kind = [
            kinds.setdefault(device.flops_per_s if known is None else known, len(kinds))
            for device, known in zip(self.problem.devices, times, strict=True)
        ]

    def _weight_of(self, times: Sequence[LayerTimes | None]) -> Callable[[int], Array]:
        """Seconds of weight gradients that may be put off: none but under zero-bubble, where known."""

        def of(d: int) -> Array:
            known = times[d]
            if not self.zero or known is None or known.weight_s is None:
                return np.zeros(self.layers)
            return np.array(known.weight_s)

        return of

    def _sizes(self) -> None:
        layers = self.problem.layers
        put_off = [layer.deferred_bytes if self.zero else 0.0 for layer in layers]
        self.deferred = [0.0, *accumulate(put_off)]
        self.state = [0.0, *accumulate(x.state_bytes + y for x, y in zip(layers, put_off, strict=True))]
        self.activation = [0.0, *accumulate(layer.activation_bytes for layer in layers)]
        self.output = [layer.output_bytes for layer in layers]
        self.window = self.problem.receive_window
        # what [start, stop) needs is a difference of sums over the whole model, rounded as those are
        rounded = SUMS * (self.state[-1] + self.microbatches * self.activation[-1])
        self.available = [
            math.inf
            if d.memory_bytes is None
            else d.memory_bytes * (1 + ROUNDING) - d.reserved_bytes + rounded
            for d in self.problem.devices
        ]
        self.unlimited = all(x == math.inf for x in self.available)
        self._workspace = _maxima([layer.workspace_bytes for layer in layers])
        if self.mixed:
            self._recomputed = _Recomputed(layers)

    def _ways(self) -> None:
        self._way: dict[tuple[int, int], Way] = {}
        sent: dict[tuple[int, int], float] = {}
        for link in self.problem.links:
            key = (self._index[link.source], self._index[link.target])
            self._way[key] = Way(link.latency_s, link.sent_share / link.bandwidth_bytes_per_s, ())
            sent[key] = link.sent_share
        for number, resource in enumerate(self.problem.shared):
            named = {(self._index[source], self._index[target]) for source, target in resource.links}
            for key in sorted(named):
                way = self._way.get(key, NO_WAY)
                entry = (number, sent.get(key, 1.0) / resource.bandwidth_bytes_per_s)
                self._way[key] = way._replace(shared=(*way.shared, entry))

    def _pins(self, names: Sequence[str] | None) -> frozenset[int]:
        return frozenset(range(self.devices)) if names is None else frozenset(self._index[n] for n in names)

    def index(self, device: str) -> int:
        """A device's index by its id; KeyError when unknown."""
        return self._index[device]

    def way(self, source: int, target: int) -> Way:
        """The directed way between two devices."""
        return self._way.get((source, target), NO_WAY)

    def occupancy_s(self, source: int, target: int, boundary: int) -> tuple[float, float]:
        """(seconds of its slowest resource, latency) of one message over the boundary after layer − 1."""
        way = self.way(source, target)
        rate = max((way.seconds_per_byte, *(x for _, x in way.shared)))
        return self.output[boundary - 1] * rate, way.latency_s

    def hop(self, source: int, target: int, boundary: int) -> Hop:
        """The same for the simulator."""
        way = self.way(source, target)
        size = self.output[boundary - 1]
        shared = tuple((number, size * rate) for number, rate in way.shared)
        return Hop(size * way.seconds_per_byte, way.latency_s, shared)

    def workspace_bytes(self, start: int, stop: int) -> float:
        """The largest workspace of layers [start, stop)."""
        return _largest(self._workspace, start, stop)

    def need_bytes(
        self, start: int, stop: int, flying: int, behind: int = 0, *, recompute: bool = False
    ) -> float:
        """What [start, stop) needs on any device with that many in flight and that many weight gradients
        behind; reserved bytes left out."""
        if recompute:
            need = self._recomputed.need_bytes(start, stop, flying)
        else:
            need = self.state[stop] - self.state[start]
            need += flying * (self.activation[stop] - self.activation[start])
            need += self.workspace_bytes(start, stop)
            if behind:
                need += behind * (self.deferred[stop] - self.deferred[start])
        if self.window:
            ahead = self.output[start - 1] if start else 0.0
            back = self.output[stop - 1] if stop < self.layers else 0.0
            need += self.window * (ahead + back)
        return need

    def tables(self, *, recompute: bool) -> tuple[list[float], list[float], list[float]]:
        """(prefix sums of what a stage always has, and has per microbatch in flight; what each layer adds
        while it runs)."""
        if recompute:
            return self._recomputed.state, self._recomputed.kept, self._recomputed.peak[0]
        return self.state, self.activation, self._workspace[0]

    def fits(
        self, device: int, start: int, stop: int, flying: int, behind: int = 0, recompute: bool | None = None
    ) -> bool:
        """Whether that range fits on that device; ``recompute`` None: in whichever way is allowed."""
        limit = self.available[device]
        if limit == math.inf:
            return True
        if not recompute and self.need_bytes(start, stop, flying, behind) <= limit:
            return True
        if recompute is False or not self.mixed:
            return False
        return self.need_bytes(start, stop, flying, recompute=True) <= limit

    def flying(self, stage: int, stages: int) -> int:
        """The (least) number in flight of a stage."""
        return in_flight(self.schedule, stage, stages, self.microbatches)

    def busy_s(self, device: int, start: int, stop: int) -> float:
        """Forward and backward of one microbatch."""
        work = self.work[device]
        return work[stop] - work[start]

    def messages_s(self, device: int, start: int, stop: int) -> float:
        """What comes with a stage's forward, and with its backward, outside of these."""
        return self._between[device] + self._neighbours_s(device, start, stop)

    def beside_s(self, device: int, start: int, stop: int) -> float:
        """What a stage's forward, and its backward, takes beside its layers."""
        return self.handling[device] + self._neighbours_s(device, start, stop)

    def _neighbours_s(self, device: int, start: int, stop: int) -> float:
        return self.neighbour[device] * ((start > 0) + (stop < self.layers))

    def allowed(self, pieces: Sequence[Piece]) -> bool:
        """Memory (with the least in flight) and pins hold."""
        if pieces[0].device not in self.first or pieces[-1].device not in self.last:
            return False
        count = len(pieces)
        return all(self.fits(d, p, q, self.flying(s, count)) for s, (d, p, q) in enumerate(pieces))
