"""How several pipelines sum their gradients: groups of layers, their routes, and all sums on one network."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skyctl.errors import InputError
from skyctl.planner.cost_model import Placement
from skyctl.planner.data.holder_costs import DataModel, DevicePair
from skyctl.planner.data.route_layouts import (
    DeviceRoute,
    Layout,
    RouteUse,
    busiest_byte_s,
    device_routes,
    layouts_of,
    use_of,
)
from skyctl.records.sync import Route, SyncGroup

Floats = npt.NDArray[np.float64]


class GroupRoutes(NamedTuple):
    """Over which routes the holders of some layers sum.

    Attributes:
        byte_s: seconds that a byte of gradient takes on the busiest link or shared resource.
        loads: by link (a pair) and shared resource (a number), seconds that a byte of gradient takes there.
    """

    routes: tuple[DeviceRoute, ...]
    use: RouteUse
    byte_s: float
    loads: tuple[tuple[Hashable, float], ...]


class SumGroup(NamedTuple):
    """Layers [start, stop) that the same devices hold, one of each pipeline, and how they are summed."""

    start: int
    stop: int
    holders: tuple[int, ...]
    size_bytes: float
    routed: GroupRoutes


def layer_groups(placements: Sequence[Placement]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(start, stop, holders ascending) of the largest ranges of layers that the same devices hold."""
    if len(placements) == 1:
        return [(p, q, (d,)) for d, p, q in placements[0]]
    cuts = sorted({0, *(stage.stop for placement in placements for stage in placement)})
    at = [0] * len(placements)
    out = []
    for start, stop in pairwise(cuts):
        for i, placement in enumerate(placements):
            if placement[at[i]].stop <= start:
                at[i] += 1
        holders = (placement[k].device for placement, k in zip(placements, at, strict=True))
        out.append((start, stop, tuple(sorted(holders))))
    return out


def group_records(ids: Sequence[str], groups: Sequence[SumGroup]) -> tuple[SyncGroup, ...]:
    """The groups as a plan's record has them; ``ids``: the devices' names."""

    def named(pairs: Sequence[DevicePair]) -> tuple[tuple[str, ...], ...]:
        return tuple((ids[a], ids[b]) for a, b in pairs)

    return tuple(
        SyncGroup(
            start=group.start,
            stop=group.stop,
            routes=tuple(
                Route(share=share, root=ids[root], up=named(up), down=named(down))
                for share, root, up, down in group.routed.routes
            ),
        )
        for group in groups
    )


def read_groups(
    ids: Sequence[str],
    placements: Sequence[Placement],
    groups: Sequence[SyncGroup],
    routed: Callable[[int, int, tuple[int, ...], Sequence[DeviceRoute]], SumGroup],
) -> list[SumGroup]:
    """The groups of a plan's record, over the routes that it has.

    Args:
        routed: makes one of a range of layers, its holders, and its routes.

    Raises:
        InputError: they are not those of these pipelines, or go over a device that there is not.
    """
    held = layer_groups(placements)
    if [(start, stop) for start, stop, _ in held] != [(group.start, group.stop) for group in groups]:
        raise InputError("the plan's sync groups are not the ranges of layers that the same devices hold")
    index = {name: d for d, name in enumerate(ids)}
    return [
        routed(start, stop, holders, device_routes(group.routes, index))
        for (start, stop, holders), group in zip(held, groups, strict=True)
    ]


class SumRoutes:
    """The routes that a problem leaves to some holders, looked up by holders."""

    def __init__(self, lines: DataModel) -> None:
        self.lines = lines
        count = len(lines.ids)
        self._byte_s, self._latency_s = np.zeros((count, count)), np.zeros((count, count))
        for pair, byte_s in lines.byte_s.items():
            self._byte_s[pair] = byte_s
        for pair, latency_s in lines.latency_s.items():
            self._latency_s[pair] = latency_s
        self._shared = [np.zeros((count, count)) for _ in lines.problem.shared]
        for pair, used in lines.shared.items():
            for number, byte_s in used:
                self._shared[number][pair] = byte_s
        self._terms: dict[tuple[int, ...], tuple[tuple[Layout, ...], Floats, Floats]] = {}
        self._known: dict[Layout, GroupRoutes] = {}

    def of(self, routes: Sequence[DeviceRoute]) -> GroupRoutes:
        """Routes with what a byte of gradient takes on them."""
        use = use_of(routes, self.lines.latency_s)
        byte_s = busiest_byte_s(use, self.lines.byte_s, self.lines.shared)
        return GroupRoutes(tuple(routes), use, byte_s, loads_of(self.lines, use))

    def fastest(self, holders: tuple[int, ...], size_bytes: float) -> GroupRoutes:
        """A ring or a star, whichever sums so many bytes in the least time by itself; ties: the first one."""
        if holders not in self._terms:
            self._terms[holders] = self._terms_of(holders)
        layouts, byte_s, latency_s = self._terms[holders]
        layout = layouts[int(np.argmin(size_bytes * byte_s + latency_s))]
        if layout not in self._known:
            self._known[layout] = self.of(layout.routes())
        return self._known[layout]

    def _terms_of(self, holders: tuple[int, ...]) -> tuple[tuple[Layout, ...], Floats, Floats]:
        """The layouts that ``sync`` leaves, and by layout seconds a byte takes and seconds of latency."""
        layouts = layouts_of(holders, self.lines.problem.sync)
        at = np.ix_(holders, holders)
        byte_s, latency_s = self._byte_s[at], self._latency_s[at]
        shared = [resource[at] for resource in self._shared]
        star_s = np.maximum(byte_s.max(axis=0), byte_s.max(axis=1))
        for resource in shared:
            star_s = np.maximum(star_s, resource.sum(axis=0) + resource.sum(axis=1))
        star_latency_s = latency_s.max(axis=0) + latency_s.max(axis=1)
        if layouts[0].root is not None:
            return layouts, star_s, star_latency_s
        count = len(holders)
        here, after = np.arange(count), (np.arange(count) + 1) % count
        ring_s = byte_s[here, after].max(initial=0.0)
        for resource in shared:
            ring_s = max(ring_s, resource[here, after].sum())
        ring_s *= 2 * (count - 1) / count
        hops_s = latency_s[here, after]
        # up to a root all hops but the one after it, down again all but the one before it
        ring_latency_s = 2 * hops_s.sum() - (hops_s + np.roll(hops_s, 1)).min(initial=math.inf)
        if len(layouts) == 1:
            return layouts, np.array([ring_s]), np.array([ring_latency_s])
        return layouts, np.append(ring_s, star_s), np.append(ring_latency_s, star_latency_s)


def loads_of(
    lines: DataModel, use: RouteUse, scaled: Callable[[DevicePair], float] = lambda _pair: 1.0
) -> tuple[tuple[Hashable, float], ...]:
    """By link and shared resource, seconds a byte of gradient takes there; ``scaled``: by link, a factor."""
    loads: dict[Hashable, float] = {}
    for pair, used in use.links.items():
        factor = used * scaled(pair)
        if alone_s := factor * lines.byte_s.get(pair, 0.0):
            loads[pair] = alone_s
        for number, byte_s in lines.shared.get(pair, ()):
            loads[number] = loads.get(number, 0.0) + factor * byte_s
    return tuple(loads.items())


def released_s(
    placements: Sequence[Placement],
    ends_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[Sequence[float]]],
) -> list[float]:
    """By layer, when its last holder has its gradient, in seconds from the step's beginning.

    Args:
        ends_s: by pipeline and stage, when its last backward ends.
        backward_s: by pipeline and stage, prefix sums over all layers of one backward on its device.
    """
    out = [0.0] * placements[0][-1].stop
    for placement, ends, sums in zip(placements, ends_s, backward_s, strict=True):
        for (_, start, stop), end, before in zip(placement, ends, sums, strict=True):
            begin = end + before[start]
            for layer in range(start, stop):
                out[layer] = max(out[layer], begin - before[layer])
    return out


def last_sum_s(
    groups: Iterable[SumGroup],
    loads: Iterable[Sequence[tuple[Hashable, float]]],
    layer_bytes: Sequence[float],
    released: Sequence[float],
) -> float:
    """When the last byte of all sums is through, in seconds from the step's beginning, latency left out.

    Every link and shared resource serves layers in order of their release, the later layer first where two
    are released at once. ``loads``: by group, as in ``GroupRoutes``.
    """
    used: list[Sequence[tuple[Hashable, float]]] = []
    for group, load in zip(groups, loads, strict=True):
        used += [load] * (group.stop - group.start)
    free: dict[Hashable, float] = {}
    for layer in sorted(range(len(used)), key=lambda k: (released[k], -k)):
        size, at = layer_bytes[layer], released[layer]
        if size:
            for resource, byte_s in used[layer]:
                free[resource] = max(free.get(resource, 0.0), at) + size * byte_s
    return max(free.values(), default=0.0)


def longest_sum_s(
    groups: Sequence[SumGroup],
    loads: Iterable[Sequence[tuple[Hashable, float]]],
    ends_s: Mapping[int, float],
) -> float:
    """What sums take that are made beside the next step, in seconds: no step is shorter.

    A group begins when the last of its holders has ended its last backward. Every link and shared resource
    serves groups in order of their beginning, the later layers first where equal. The longest of what a group
    takes from its beginning to its end, latency included, and of what any resource is used in all.

    Args:
        loads: by group, as in ``GroupRoutes``.
        ends_s: by device, when its last backward ends.
    """
    longest = 0.0
    free: dict[Hashable, float] = {}
    used: dict[Hashable, float] = {}
    begun = [(max(ends_s[d] for d in group.holders), -group.start, group) for group in groups]
    for (at, _, group), load in sorted(zip(begun, loads, strict=True), key=lambda one: one[0][:2]):
        done = at
        for resource, byte_s in load:
            spent_s = group.size_bytes * byte_s
            free[resource] = max(free.get(resource, 0.0), at) + spent_s
            used[resource] = used.get(resource, 0.0) + spent_s
            done = max(done, free[resource])
        longest = max(longest, done - at + group.routed.use.latency_s)
    return max([longest, *used.values()])
