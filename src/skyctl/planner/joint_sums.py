"""When the sums of several groups of layers, which share links, are through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from skyctl.planner.candidate import AS_MEASURED, SumGroup, TimeScale
from skyctl.planner.cost_model import Placement
from skyctl.planner.routes.route_layouts import RouteUse
from skyctl.planner.sum_costs import SumCosts

Loads = Sequence[tuple[Hashable, float]]
"""By resource, seconds that a byte of gradient takes there, as in ``GroupRoutes``."""
MANY_RELEASES = 2_000
"""Stages × layers from which releases are computed by arrays."""


def loads_of(costs: SumCosts, use: RouteUse, scale: TimeScale = AS_MEASURED) -> Loads:
    """By link and shared resource, seconds a byte of gradient takes there."""
    loads: dict[Hashable, float] = {}
    for pair, used in use.links.items():
        factor = used * scale.link(pair)
        if alone_s := factor * costs.byte_s.get(pair, 0.0):
            loads[pair] = alone_s
        for number, byte_s in costs.shared.get(pair, ()):
            loads[number] = loads.get(number, 0.0) + factor * byte_s
    return tuple(loads.items())


def scaled_loads(costs: SumCosts, group: SumGroup, scale: TimeScale) -> Loads:
    """A group's loads with other times of its links and helpers."""
    if scale is AS_MEASURED:
        return group.routed.loads
    helping = [
        (name, scale.device(name[0]) * byte_s)
        for name, byte_s in group.routed.loads
        if isinstance(name, tuple) and name[0] == name[1]
    ]
    return (*loads_of(costs, group.routed.use, scale), *helping)


def busiest_loads(groups: Sequence[SumGroup], loads: Sequence[Loads]) -> list[Loads]:
    """By group, the loads that can decide when it ends.

    Of resources that no other group uses, that is the busiest: all serve the same layers in the same order.
    """
    users = (
        Counter(name for group_loads in loads for name, _ in group_loads) if len(groups) > 1 else Counter()
    )
    out: list[Loads] = []
    for group_loads in loads:
        own = [load for load in group_loads if users[load[0]] <= 1]
        common = [load for load in group_loads if users[load[0]] > 1]
        out.append([*common, max(own, key=lambda load: load[1])] if own else common)
    return out


def released_s(
    placements: Sequence[Placement],
    ends_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[Sequence[float]]],
) -> Sequence[float]:
    """By layer, when its last replica has its gradient, in seconds from the step's beginning.

    Args:
        ends_s: by pipeline and stage, when its last backward ends.
        backward_s: by pipeline and stage, prefix sums over all layers of one backward on its device.
    """
    layers = placements[0][-1].stop
    if layers * len(placements) > MANY_RELEASES:
        latest = np.zeros(layers)
        for placement, ends, sums in zip(placements, ends_s, backward_s, strict=True):
            for (_, start, stop), end, before in zip(placement, ends, sums, strict=True):
                there = end + before[start] - np.asarray(before[start:stop])
                np.maximum(latest[start:stop], there, out=latest[start:stop])
        return [float(at) for at in latest]
    out = [0.0] * layers
    for placement, ends, sums in zip(placements, ends_s, backward_s, strict=True):
        for (_, start, stop), end, before in zip(placement, ends, sums, strict=True):
            begin = end + before[start]
            for layer in range(start, stop):
                out[layer] = max(out[layer], begin - before[layer])
    return out


def last_sum_s(
    groups: Sequence[SumGroup],
    loads: Sequence[Loads],
    layer_bytes: Sequence[float],
    released: Sequence[float],
) -> float:
    """When the last byte of all sums is through, in seconds from the step's beginning, latency left out.

    Every link and shared resource serves layers in order of their release, the later layer first where two
    are released at once. ``loads``: by group.
    """
    used: list[Loads] = []
    for group, load in zip(groups, busiest_loads(groups, loads), strict=True):
        used += [load] * (group.stop - group.start)
    free: dict[Hashable, float] = {}
    for layer in sorted(range(len(used)), key=lambda k: (released[k], -k)):
        size, at = layer_bytes[layer], released[layer]
        if size:
            for resource, byte_s in used[layer]:
                free[resource] = max(free.get(resource, 0.0), at) + size * byte_s
    return max(free.values(), default=0.0)


def longest_sum_s(groups: Sequence[SumGroup], loads: Sequence[Loads], ends_s: Mapping[int, float]) -> float:
    """The seconds of the sums that run next to the following step: no step is shorter.

    A group begins when the last of its replicas has ended its last backward. Every link and shared resource
    serves groups in order of their beginning, the later layers first where equal. The longest of what a group
    takes from its beginning to its end, latency and fill included, and of what any resource is used in all.

    Args:
        loads: by group.
        ends_s: by device, when its last backward ends.
    """
    longest = 0.0
    free: dict[Hashable, float] = {}
    used: dict[Hashable, float] = {}
    begun = [(max(ends_s[d] for d in group.replicas), -group.start, group) for group in groups]
    for (at, _, group), load in sorted(
        zip(begun, loads, strict=True), key=lambda begun_load: begun_load[0][:2]
    ):
        done = at
        for resource, byte_s in load:
            spent_s = group.size_bytes * byte_s
            free[resource] = max(free.get(resource, 0.0), at) + spent_s
            used[resource] = used.get(resource, 0.0) + spent_s
            done = max(done, free[resource])
        longest = max(longest, done - at + group.fill_s + group.routed.use.latency_s)
    return max([longest, *used.values()])
