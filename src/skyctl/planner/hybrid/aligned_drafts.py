"""Drafts whose pipelines are cut alike: each cluster of devices holds some layers once for every pipeline.

Sums then stay within a cluster, and activations alone pass between clusters: the other way round than a
pipeline in each cluster has it. That is the better one where activations are small and lines between
clusters slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.heuristic.balance import balance_layers
from skyctl.planner.hybrid.device_partitions import clusterings, distances_s, speed_of
from skyctl.planner.hybrid.hybrid_model import Draft, HybridModel
from skyctl.schedule.batch_shares import best_shares

Column = tuple[int, ...]
"""The devices of one stage, one for each pipeline."""


def aligned_drafts(model: HybridModel) -> Iterator[Draft]:
    """Drafts of two pipelines or more over chains of clusters; they may not fit."""
    seen: set[tuple[Column, ...]] = set()
    for columns in _all_columns(model):
        if columns not in seen:
            seen.add(columns)
            yield from _cut(model, columns)


def _all_columns(model: HybridModel) -> Iterator[tuple[Column, ...]]:
    base = model.base
    for clusters in clusterings(base):
        large = [_by_speed(base, cluster) for cluster in clusters if len(cluster) > 1]
        for chain in _chains(base, large):
            for count in range(2, min(*map(len, chain), model.microbatches) + 1):
                columns = [column for cluster in chain for column in _columns_of(cluster, count)]
                if len(columns) <= model.layers:
                    yield tuple(columns)


def _chains(costs: CostModel, clusters: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], ...]]:
    """The nearest two clusters, then with each next one at the end that it is nearer to; and each alone."""
    yield from ((cluster,) for cluster in clusters)
    table = distances_s(costs)

    def away_s(cluster: Sequence[int], other: Sequence[int]) -> float:
        return table.item(cluster[0], other[0])

    left = list(clusters)
    if len(left) < 2:
        return
    _, i, j = min((away_s(a, b), i, j) for i, a in enumerate(left) for j, b in enumerate(left[:i]))
    chain = [left[i], left[j]]
    left = [cluster for k, cluster in enumerate(left) if k not in (i, j)]
    yield tuple(chain)
    while left:
        _, k, at_end = min(
            (away_s(end, cluster), k, at_end)
            for k, cluster in enumerate(left)
            for end, at_end in ((chain[0], False), (chain[-1], True))
        )
        chain.insert(len(chain) if at_end else 0, left.pop(k))
        yield tuple(chain)


def _by_speed(costs: CostModel, cluster: Sequence[int]) -> list[int]:
    """A cluster's devices, the fastest first."""
    return sorted(cluster, key=lambda d: (-speed_of(costs, d), d))


def _columns_of(ranked: Sequence[int], count: int) -> list[Column]:
    """A cluster's devices in columns of ``count`` that are about as fast, the fastest first."""
    return [tuple(ranked[k : k + count]) for k in range(0, len(ranked) - count + 1, count)]


def _cut(model: HybridModel, columns: tuple[Column, ...]) -> Iterator[Draft]:
    """With the cuts that balance the first, the middle and the last pipeline."""
    m, count = model.microbatches, len(columns[0])
    share = max(1, m // count)
    for k in dict.fromkeys((0, count // 2, count - 1)):
        balanced = balance_layers(model.costs(share), [column[k] for column in columns])
        if balanced is None:
            continue
        stops = [stage.stop for stage in balanced[1]]
        placements = tuple(_placed(row, stops) for row in zip(*columns, strict=True))
        slowest_s = [max(model.base.busy_s(*stage) for stage in placement) for placement in placements]
        yield Draft(placements, best_shares(m, [0.0] * count, slowest_s))


def _placed(devices: Sequence[int], stops: Sequence[int]) -> Placement:
    starts = (0, *stops)
    return tuple(StageAssignment(*fields) for fields in zip(devices, starts, stops, strict=False))
