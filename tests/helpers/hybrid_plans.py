"""Plans of several pipelines with cuts or routes of their own, written by hand from others."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Stages = Sequence[tuple[str, int, int]]
"""(device, start, stop) in the order of layers."""


def hybrid_plan(
    plan: Mapping[str, Any], pipelines: Sequence[tuple[Stages, int]], star: bool = False
) -> dict[str, Any]:
    """The plan file with these (stages, microbatches) in place of what it had.

    Every largest range of layers that the same devices hold is a group, summed over a ring, or with ``star``
    at one of its holders, each group at the next.
    """
    stages = [stage for row, _ in pipelines for stage in row]
    cuts = sorted({0} | {stop for _, _, stop in stages})
    groups = []
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        holders = [name for name, first, last in stages if first < stop and start < last]
        roots = [holders[number % len(holders)]] if star else holders
        routes = [_star(root, holders) if star else _path(root, holders) for root in roots]
        groups.append({"start": start, "stop": stop, "routes": routes})
    replicas = [
        {"device": device, "compute_s": 1.0, "idle_s": 0.0, "memory_bytes": 1.0} for device, _, _ in stages
    ]
    kept = {name: value for name, value in plan.items() if name not in ("stages", "pipelines", "sync")}
    return {
        **kept,
        "form": "pipelines",
        "strategy": "assigned",
        "problem": {**plan["problem"], "parallel": "hybrid", "schedule": "1f1b"},
        "pipelines": [
            {
                "stages": [
                    {"device": device, "start": start, "stop": stop,
                     "in_flight": min(microbatches, len(row) - number)}
                    for number, (device, start, stop) in enumerate(row)
                ],
                "microbatches": microbatches,
            }
            for row, microbatches in pipelines
        ],
        "sync": {"chunk_bytes": 128, "groups": groups},
        "predicted": {"iteration_s": 1.0, "bottleneck_s": 1.0, "replicas": replicas},
        "certificate": {"status": "feasible", "value_s": 1.0, "lower_bound_s": None, "gap": None,
                        "method": "by hand", "wall_s": 0.0},
        "unused": [],
    }  # fmt: skip


def summed_at(plan: Mapping[str, Any], root: str) -> dict[str, Any]:
    """The plan file of holders whose sums all go to that device, a helper, and back from it."""
    holders = [stage["device"] for pipeline in plan["pipelines"] for stage in pipeline["stages"]]
    [group] = plan["sync"]["groups"]
    sync = plan["sync"] | {"groups": [group | {"routes": [_star(root, holders)]}]}
    return {**plan, "sync": sync, "unused": [name for name in plan["unused"] if name != root]}


def _star(root: str, holders: Sequence[str]) -> dict[str, Any]:
    others = [name for name in holders if name != root]
    return {
        "share": 1.0,
        "root": root,
        "up": [[name, root] for name in others],
        "down": [[root, name] for name in others],
    }


def _path(root: str, holders: Sequence[str]) -> dict[str, Any]:
    """A ring's way that ends at the root, and goes on round it."""
    at = holders.index(root)
    way = [*holders[at + 1 :], *holders[: at + 1]]
    return {
        "share": 1 / len(holders),
        "root": root,
        "up": [list(pair) for pair in itertools.pairwise(way)],
        "down": [list(pair) for pair in itertools.pairwise([root, *way[:-1]])],
    }
