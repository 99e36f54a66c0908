"""Sets of devices to begin a search for hybrids with: clusters, equal parts, and one device of each site."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from skyctl.planner.cost_model import CostModel

Sets = tuple[tuple[int, ...], ...]
"""Disjoint sets of devices, ascending, one for each pipeline."""

MOST_PARTS = 8
"""Equal parts that all devices, or each site's, are divided into, at most."""
FASTEST_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the devices, the fastest ones that equal parts are made of."""
SAME_DISTANCE = 1.25
"""Distances that differ by less than this factor count as one."""


def normal(sets: Iterable[Iterable[int]]) -> Sets:
    """The sets in one order, empty ones left out."""
    return tuple(sorted(tuple(sorted(devices)) for devices in sets if devices))


def speed_of(costs: CostModel, device: int) -> float:
    """Microbatches a second through all layers."""
    return 1 / max(costs.work_s[device][-1] + 2 * costs.overhead_s[device], 1e-300)


def clusterings(costs: CostModel) -> list[Sets]:
    """Devices by distance (single linkage), from the nearest ones together on to all in one cluster.

    The distance is ``distances_s``.
    """
    away_table = distances_s(costs)
    later, earlier = np.tril_indices(costs.devices, -1)
    away = away_table[later, earlier]
    order = np.lexsort((earlier, later, away))
    cluster = list(range(costs.devices))
    left = costs.devices
    out: list[Sets] = []
    level_s = 0.0
    for away_s, a, b in zip(
        away[order].tolist(), later[order].tolist(), earlier[order].tolist(), strict=True
    ):
        if left == 1:
            break
        if cluster[a] == cluster[b]:
            continue
        left -= 1
        if away_s > level_s * SAME_DISTANCE:
            out.append(_gathered(cluster))
            level_s = away_s
        old, new = cluster[a], cluster[b]
        cluster = [new if label == old else label for label in cluster]
    return [*out, _gathered(cluster)]


def distances_s(costs: CostModel) -> npt.NDArray[np.float64]:
    """By pair of devices, seconds of a message of mean size, the slower way."""
    size = sum(costs.output_bytes) / costs.layers
    ways = costs.links.latency_s + size * costs.links.message_line_s
    out: npt.NDArray[np.float64] = np.maximum(ways, ways.T)
    return out


def _gathered(cluster: Sequence[int]) -> Sets:
    members: dict[int, list[int]] = {}
    for device, number in enumerate(cluster):
        members.setdefault(number, []).append(device)
    return normal(members.values())


def equal_parts(costs: CostModel, devices: Iterable[int], count: int) -> list[list[int]]:
    """The devices in so many parts of about the same speed: the fastest first, each to the slowest part."""
    parts: list[list[int]] = [[] for _ in range(count)]
    speeds = [0.0] * count
    for d in sorted(devices, key=lambda d: (-speed_of(costs, d), d)):
        least = min(range(count), key=lambda i: speeds[i])
        parts[least].append(d)
        speeds[least] += speed_of(costs, d)
    return parts


def starting_sets(costs: CostModel, microbatches: int) -> Iterator[Sets]:
    """Disjoint sets to begin with, two of them or more, never more than there are microbatches."""
    levels = clusterings(costs)
    for sets in _all_starts(costs, levels, min(MOST_PARTS, microbatches)):
        if 1 < len(sets) <= microbatches:
            yield sets


def _all_starts(costs: CostModel, levels: Sequence[Sets], most: int) -> Iterator[Sets]:
    for clusters in levels:
        yield clusters
        yield from _few_of(costs, clusters)
    for clusters in levels:
        for count in range(2, most + 1):
            if count * len(clusters) <= costs.devices:
                parts = [part for devices in clusters for part in equal_parts(costs, devices, count)]
                yield normal(parts)  # several pipelines in each cluster
            parts_of = [equal_parts(costs, devices, count) for devices in clusters]
            # parts that lack a device are joined to others, so that the slow clusters' fastest even it out
            yield normal([d for parts in parts_of for d in parts[i]] for i in range(count))
    fast = sorted(range(costs.devices), key=lambda d: (-speed_of(costs, d), d))
    for share in FASTEST_SHARES:
        chosen = fast[: max(2, round(share * costs.devices))]
        for count in range(2, min(most, len(chosen)) + 1):
            yield normal(equal_parts(costs, chosen, count))
        yield normal((d,) for d in chosen)


def _few_of(costs: CostModel, clusters: Sets) -> Iterator[Sets]:
    """The fastest clusters alone; and clusters joined, the fastest with the slowest, until two are left."""
    ranked = sorted(clusters, key=lambda devices: -sum(speed_of(costs, d) for d in devices))
    for count in range(2, min(len(ranked), MOST_PARTS + 1)):
        yield normal(ranked[:count])
        joined: list[list[int]] = [[] for _ in range(count)]
        speeds = [0.0] * count
        for devices in ranked:
            least = min(range(count), key=lambda i: speeds[i])
            joined[least] += devices
            speeds[least] += sum(speed_of(costs, d) for d in devices)
        yield normal(joined)
