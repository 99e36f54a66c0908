"""Groups of devices with fast links among them and slow ones between: what a message there and back costs.

Only ranges are kept, [least, most] seconds of one message there and one back over a boundary, latencies
included, each link uncontended: for a bound the least counts as time, the most as room.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import pairwise

from skyctl.planner.model import Model

RATIO = 1.5
"""A step this large between two costs, one after the other in size, parts near from far."""
MAX_SITES = 8

Range = tuple[float, float]


@dataclass(frozen=True)
class Sites:
    """``members``: the devices of each site. ``between[g, h]``: the range of costs from g to h (g = h:
    inside, (0, 0) for a site of one device)."""

    members: tuple[tuple[int, ...], ...]
    between: dict[tuple[int, int], Range]
    least: tuple[tuple[float, ...], ...]
    least_anywhere: tuple[float, ...]

    def inside(self) -> Range:
        """Over all sites."""
        return _hull([self.between[g, g] for g, site in enumerate(self.members) if len(site) > 1])

    def across(self) -> Range:
        """Over all pairs of sites."""
        return _hull([cost for (g, h), cost in self.between.items() if g != h])


def find_sites(model: Model) -> Sites:
    """Sites by single linkage, cut at the largest step in the sorted costs; one site where there is none."""
    costs = _costs(model)
    members = _grouped(model, costs)
    between = {}
    for g, here in enumerate(members):
        for h, there in enumerate(members):
            between[g, h] = _hull([costs[a, b] for a in here for b in there if a != b])
    least = tuple(_forest(site, costs) for site in members)
    return Sites(members, between, least, _forest(tuple(range(model.devices)), costs))


def _forest(devices: tuple[int, ...], costs: dict[tuple[int, int], Range]) -> tuple[float, ...]:
    """[n]: the sum of the first n edges that Kruskal's rule takes, which no n edges without a circle
    undercut."""
    group = {d: {d} for d in devices}
    out = [0.0]
    for a, b in sorted(itertools.combinations(devices, 2), key=lambda pair: costs[pair][0]):
        if group[a] is not group[b]:
            group[a] |= group[b]
            group.update(dict.fromkeys(group[b], group[a]))
            out.append(out[-1] + costs[a, b][0])
    return tuple(out)


def _costs(model: Model) -> dict[tuple[int, int], Range]:
    sizes = model.output[:-1] or [0.0]
    small, large = min(sizes), max(sizes)
    out = {}
    for a in range(model.devices):
        for b in range(model.devices):
            if a != b:
                ways = (model.way(a, b), model.way(b, a))
                rate = sum(max((way.seconds_per_byte, *(x for _, x in way.shared))) for way in ways)
                latency = sum(way.latency_s for way in ways)
                out[a, b] = (small * rate + latency, large * rate + latency)
    return out


def _grouped(model: Model, costs: dict[tuple[int, int], Range]) -> tuple[tuple[int, ...], ...]:
    whole = (tuple(range(model.devices)),)
    ranked = sorted({cost for _, cost in costs.values()})
    ranked = [cost for cost in ranked if cost > 0]
    steps = [(far / near, near) for near, far in pairwise(ranked)]
    if any(cost == 0 for _, cost in costs.values()) and ranked:
        steps.append((float("inf"), 0.0))
    if not steps or max(steps)[0] < RATIO:
        return whole
    near = max(steps)[1]
    label = list(range(model.devices))
    for (a, b), (_, cost) in sorted(costs.items()):
        if cost <= near and label[a] != label[b]:
            low, high = sorted((label[a], label[b]))
            label = [low if x == high else x for x in label]
    names = sorted(set(label))
    if len(names) > MAX_SITES:
        return whole
    return tuple(tuple(d for d in range(model.devices) if label[d] == name) for name in names)


def _hull(ranges: list[Range]) -> Range:
    if not ranges:
        return (0.0, 0.0)
    return (min(low for low, _ in ranges), max(high for _, high in ranges))
