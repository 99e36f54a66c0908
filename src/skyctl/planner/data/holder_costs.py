"""What a device costs as a holder of all layers: time, exposed gradients, memory; and the links between them.

A plan of data parallelism has one pipeline of one stage on each of its holders. Devices are indices in the
problem's order. The model of time and memory is the contract's (``docs/contract.md``, Data parallelism).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.planner import stage_memory
from skyctl.planner.data.line_rates import Line, lines_of, lines_rate
from skyctl.planner.data.summed_bytes import summed_bytes, with_added_work
from skyctl.records.problem import Device, Problem
from skyctl.records.sync import Sync

CHUNK_BYTES: int = Sync.model_fields["chunk_bytes"].default
"""Gradients are sent in pieces of so many bytes, the fewest for a processor to handle."""
SHORT_CHUNK_BYTES = 65536
"""Of pieces on slow lines, which a long one would hold up; a byte in them takes a processor twice as long."""
SLOW_BYTE_S = 4e-8
"""A line is slow from so many seconds a byte on: 200 Mbit/s."""
EDGE_BYTES = 2 * CHUNK_BYTES
"""What a holder keeps room for, for each edge of a route that arrives at it with partial sums."""
MOST_HELPERS = 4
"""Devices that may help any holders over trees; of more, those with the fattest lines."""
SCHEDULES = ("1f1b", "sequential")
"""Schedules in which one stage alone computes one microbatch after the other, as a holder does."""

DevicePair = tuple[int, int]


def require_data_problem(problem: Problem) -> None:
    """Raises InputError where the problem asks for what data parallelism does not have."""
    if problem.schedule not in SCHEDULES:
        raise InputError(
            f"schedule {problem.schedule!r} is an order for the stages of a pipeline; where every device "
            "holds all layers, each computes one microbatch after the other",
            hint="--schedule 1f1b goes with --parallel data (or leave it out)",
        )
    if problem.objective != "iteration":
        raise InputError(
            f"objective {problem.objective!r} looks at a pipeline's slowest stage; --parallel data has none",
            hint="--objective iteration",
        )
    if problem.helpers and problem.sync in ("ring", "star"):
        raise InputError(
            f"a {problem.sync} joins devices that hold the layers, so {problem.helpers[0]} can't help there",
            hint="--sync auto or trees; server: a star whose root may be a helper",
        )
    require_delayed_format(problem)


def require_delayed_format(problem: Problem) -> None:
    """Raises InputError where sums are to be applied a step later and their format does not allow it."""
    if problem.rhythm.delay and problem.sync_format == "fixed32":
        raise InputError(
            "sync format fixed32 may have to make a step again, and with a delay the next one is done by "
            "then",
            hint="--sync-format float32, or leave --sync-delay out",
        )


class GradientExposure:
    """How long gradients are under way after a holder's last backward, as a function of the summing's speed.

    Layers are summed from the last to the first. With w seconds a byte, what is left at the end of a holder's
    computing is the largest, over the layers k, of w · (bytes of layers 0 … k) less the backward of the
    layers before k: a convex function of w, of which the upper envelope's lines are kept.

    Args:
        gradient_bytes: by layer, as they are sent.
        backward_s: by layer, seconds of one backward.
    """

    def __init__(self, gradient_bytes: Sequence[float], backward_s: Sequence[float]) -> None:
        sizes = list(accumulate(gradient_bytes))
        hidden = [0.0, *accumulate(backward_s[:-1])]
        hull: list[tuple[float, float]] = []
        for point in zip(sizes, hidden, strict=True):
            if hull and point[0] <= hull[-1][0]:
                continue  # as many bytes, later: the earlier layer's line is above it everywhere
            while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        self._hull = hull
        self._slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(hull)]

    def at(self, seconds_per_byte: float) -> float:
        """Seconds from the end of the holder's computing to the last byte, if nobody else were later."""
        size, hidden_s = self._hull[bisect_left(self._slopes, seconds_per_byte)]
        return seconds_per_byte * size - hidden_s


def _turns_down(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b is on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


class HolderCost(NamedTuple):
    """A device as a holder of all layers.

    Attributes:
        microbatch_s: seconds of a microbatch's forward and backward, overhead and recomputation included.
        layers_s: the part of ``microbatch_s`` that its layers take.
        optimizer_s: seconds of its optimizer, and of compressing gradients, once a step.
        memory_bytes: what it needs, reserved bytes and what sums keep included, chunks left out.
        recompute: whether it keeps its layers' inputs only.
        exposure: how long gradients are under way after its last backward.
    """

    microbatch_s: float
    layers_s: float
    optimizer_s: float
    memory_bytes: float
    recompute: bool
    exposure: GradientExposure


class DataModel:
    """One problem of data parallelism as plain numbers. Read only.

    Attributes:
        ids: the devices' names.
        layer_bytes: by layer, bytes of its gradient as they are sent; where all layers are summed together a
            second pass is the first layer's, whose gradients come last.
        second_bytes: by layer, its part of a second pass, which ``layer_bytes`` has, too, unless all layers
            are summed together.
        passes: how many sums, one after another, a step has.
        total_bytes: of all layers' gradients as they are sent.
        latency_s: by linked pair, of all passes.
        byte_s: by linked pair, seconds a byte takes on the link.
        shared: by pair, the shared resources that it occupies: (number, seconds a byte takes there).
        may_hold: by device, whether the pins let it hold the first and the last layer, and it is not named
            as a helper.

    Raises:
        InputError: the problem's schedule or objective is one of pipelines.
    """

    def __init__(self, problem: Problem) -> None:
        require_data_problem(problem)
        self.problem = problem
        self.ids = [device.id for device in problem.devices]
        self.microbatches = problem.microbatches
        sizes = summed_bytes(problem)
        self.second_bytes = [size.second for size in sizes]
        self.passes = 2 if any(self.second_bytes) else 1
        self.layer_bytes = [size.first + size.second for size in sizes]
        if problem.parallel == "data":
            self.layer_bytes = self.late_bytes(0, len(sizes))
        self._kept_bytes = math.fsum(size.kept for size in sizes)
        self._timed = with_added_work(problem)
        self.total_bytes = math.fsum(self.layer_bytes)
        pins = [names for names in (problem.first_stage, problem.last_stage) if names is not None]
        named = problem.helpers or ()
        self.may_hold = [name not in named and all(name in names for names in pins) for name in self.ids]
        self._costs = [self._costs_of(device) for device in problem.devices]
        index = {name: d for d, name in enumerate(self.ids)}
        self.latency_s: dict[DevicePair, float] = {}
        self.byte_s: dict[DevicePair, float] = {}
        for link in problem.links:
            pair = (index[link.source], index[link.target])
            self.latency_s[pair] = self.passes * link.latency_s
            self.byte_s[pair] = 1 / link.bandwidth_bytes_per_s
        self.shared: dict[DevicePair, list[tuple[int, float]]] = {}
        for number, resource in enumerate(problem.shared):
            for pair in {(index[source], index[target]) for source, target in resource.links}:
                self.shared.setdefault(pair, []).append((number, 1 / resource.bandwidth_bytes_per_s))

    def late_bytes(self, start: int, stop: int) -> list[float]:
        """``layer_bytes`` of layers that are summed together, with their second pass in the first one's."""
        late = self.second_bytes[start:stop]
        sizes = [size - x for size, x in zip(self.layer_bytes[start:stop], late, strict=True)]
        return [sizes[0] + math.fsum(late), *sizes[1:]]

    @cached_property
    def lines(self) -> dict[DevicePair, Line]:
        """By pair of devices, the link with what it shares."""
        return lines_of(self)

    @cached_property
    def _helper_order(self) -> list[int]:
        """The devices that may help where they hold nothing, those with the fattest lines first."""
        named, count = self.problem.helpers, len(self.ids)
        able = [d for d in range(count) if named is None or self.ids[d] in named]

        def line_rate(d: int) -> float:
            others = [x for x in range(count) if x != d]
            out, back = [(d, x) for x in others], [(x, d) for x in others]
            return min(lines_rate(self, out), lines_rate(self, back))

        return sorted(able, key=line_rate, reverse=True)

    def helpers_of(self, holders: Collection[int]) -> tuple[int, ...]:
        """The devices that may help these holders: none in a ring and in a star, few with trees."""
        if self.problem.sync in ("ring", "star"):
            return ()
        found = [d for d in self._helper_order if d not in holders]
        return tuple(sorted(found if self.problem.sync == "server" else found[:MOST_HELPERS]))

    def any_helpers(self) -> tuple[int, ...]:
        """The devices that may help some holders or other."""
        return () if self.problem.sync in ("ring", "star") else tuple(self._helper_order)

    def edge_bytes(self, children: int) -> float:
        """What a holder keeps more where so many edges arrive at it.

        With a parameter server that is also a buffer for its own gradients, and at the root the weights that
        pushes are applied to, and a buffer for each other worker.
        """
        if not self.problem.rhythm.is_stale:
            return buffer_bytes(children)
        return buffer_bytes(children) + self.total_bytes * (1 + (1 + children if children else 0))

    def helper_bytes(self, device: int, children: int) -> float:
        """What a device needs to help: what is taken of its memory anyway, and its chunks."""
        return self.problem.devices[device].reserved_bytes + self.edge_bytes(children)

    def may_help(self, device: int, children: int) -> bool:
        """Whether it has the memory to help with that many arriving edges."""
        needs = self.helper_bytes(device, children)
        return stage_memory.fits_device(needs, self.problem.devices[device])

    def _costs_of(self, device: Device) -> tuple[HolderCost, ...]:
        """Without recomputation, and where it is allowed with it."""
        problem = self.problem
        times = self._timed.times.get(device.id)
        if times is None:
            whole = [layer.flops / device.flops_per_s for layer in problem.layers]
            forward, backward = [x / 3 for x in whole], [x - x / 3 for x in whole]
            optimizer_s = 0.0
        else:
            forward, backward = list(times.forward_s), list(times.backward_s)
            optimizer_s = math.fsum(times.optimizer_s)
        costs = []
        for recompute in (False, True) if problem.recompute else (False,):
            back = [b + f for f, b in zip(forward, backward, strict=True)] if recompute else backward
            layers_s = math.fsum(forward) + math.fsum(back)
            costs.append(
                HolderCost(
                    microbatch_s=layers_s + device.handling_s + device.action_s,
                    layers_s=layers_s,
                    optimizer_s=optimizer_s,
                    memory_bytes=self._kept_bytes
                    + stage_memory.device_bytes(
                        problem, device, 0, len(problem.layers), 1, recompute=recompute
                    ),
                    recompute=recompute,
                    exposure=GradientExposure(self.layer_bytes, back),
                )
            )
        return tuple(costs)

    def least_bytes(self, device: int, children: int = 0) -> float:
        """The fewest bytes that it needs as a holder with that many arriving edges."""
        return min(cost.memory_bytes for cost in self._costs[device]) + self.edge_bytes(children)

    def cost(self, device: int, *, recompute: bool) -> HolderCost:
        """The device as a holder, whether it has the memory or not. InputError: it may not recompute."""
        costs = self._costs[device]
        if recompute and len(costs) == 1:
            raise InputError(f"{self.ids[device]} recomputes, and the problem does not allow it")
        return costs[recompute]

    def fitting_cost(self, device: int, children: int = 0) -> HolderCost | None:
        """The device as a holder with that many arriving edges; it recomputes only where it must.

        None: it has no memory for it, or the pins keep it from holding all layers.
        """
        if not self.may_hold[device]:
            return None
        described = self.problem.devices[device]
        for cost in self._costs[device]:
            if stage_memory.fits_device(cost.memory_bytes + self.edge_bytes(children), described):
                return cost
        return None


def buffer_bytes(children: int) -> float:
    """Bytes of the chunks that a holder with that many arriving edges keeps room for."""
    return float(children * EDGE_BYTES)


def message_factor(problem: Problem, byte_s: float) -> float:
    """By how much ``message_byte_s`` counts where a byte takes so long, or longer, on the busiest line.

    Twice where pieces are short and sums are made beside layers, so that nothing hides it; else once.
    """
    return 2.0 if problem.rhythm.delay and byte_s >= SLOW_BYTE_S else 1.0


def chunk_bytes_at(byte_s: float, passes: int = 1) -> int:
    """In pieces of how many bytes gradients are sent, where a byte takes so long on the busiest line.

    Of several passes each begins when the last piece of the one before has gone all the way: a quarter.
    """
    size = SHORT_CHUNK_BYTES if byte_s >= SLOW_BYTE_S else CHUNK_BYTES
    return size if passes == 1 else size // 4
