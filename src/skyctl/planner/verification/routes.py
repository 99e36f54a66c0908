"""Routes of sums as ``verify`` reads them: trees, rings and stars, and what they pass one after another.

Nothing is shared with ``planner/routes`` and ``planner/data``: routes are walked edge by edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from skyctl.planner.verification.verdict import TOLERANCE
from skyctl.records.problem import SyncRoutes
from skyctl.records.sync import Route

Edge = tuple[str, str]


class CheckedRoute(NamedTuple):
    """A route's share of the bytes, and its edges in the direction in which they send."""

    share: float
    root: str
    up: tuple[Edge, ...]
    down: tuple[Edge, ...]


Trees = tuple[CheckedRoute, ...]


def checked_routes(routes: Sequence[Route]) -> Trees:
    """A record's routes as trees."""
    return tuple(
        CheckedRoute(x.share, x.root, tuple((a, b) for a, b in x.up), tuple((a, b) for a, b in x.down))
        for x in routes
    )


def stars(devices: Sequence[str], sync: SyncRoutes, helpers: Sequence[str] = ()) -> Iterator[Trees]:
    """A star at each device, where ``sync`` leaves any; ``helpers``: further roots, with ``server``."""
    roots = () if sync == "ring" else (*devices, *helpers) if sync == "server" else devices
    for root in roots:
        others = [x for x in devices if x != root]
        yield (CheckedRoute(1.0, root, tuple((x, root) for x in others), tuple((root, x) for x in others)),)


def is_ring(trees: Trees, devices: Sequence[str]) -> bool:
    """Whether the trees are a ring of these devices, in whatever order."""
    after = dict(trees[0].down)
    order = [trees[0].root]
    while order[-1] in after and len(order) < len(devices):
        order.append(after[order[-1]])
    return sorted(order) == sorted(devices) and are_same(trees, ring(order))


def is_star(trees: Trees, devices: Sequence[str]) -> bool:
    """Whether the trees are a star of these devices at one of them."""
    return any(are_same(trees, other) for other in stars(devices, "star"))


def ring(devices: Sequence[str]) -> Trees:
    """A ring in that order: as many trees as devices, each a way around but for one edge."""
    count = len(devices)
    around = [tuple(devices[(i + j) % count] for j in range(count)) for i in range(count)]
    return tuple(
        CheckedRoute(
            1 / count,
            order[0],
            tuple(zip(order[1:], (*order[2:], order[0]), strict=True)),
            tuple(pairwise(order)),
        )
        for order in around
    )


def are_same(trees: Sequence[CheckedRoute], others: Sequence[CheckedRoute]) -> bool:
    """Whether both have the same edges and shares, in any order."""

    def by_root(routes: Sequence[CheckedRoute]) -> list[CheckedRoute]:
        return sorted(routes, key=lambda route: route.root)

    return len(trees) == len(others) and all(
        a.root == b.root
        and math.isclose(a.share, b.share, rel_tol=TOLERANCE)
        and (len(a.up), set(a.up)) == (len(b.up), set(b.up))
        and (len(a.down), set(a.down)) == (len(b.down), set(b.down))
        for a, b in zip(by_root(trees), by_root(others), strict=True)
    )


def children(trees: Sequence[CheckedRoute]) -> Mapping[str, int]:
    """By device, how many edges arrive at it with partial sums, over all trees."""
    out: dict[str, int] = {}
    for tree in trees:
        for _, parent in tree.up:
            out[parent] = out.get(parent, 0) + 1
    return out


def ways_from_root(
    edges: Iterable[Edge], root: str, child: int, latency_s: Mapping[Edge, float]
) -> dict[str, float]:
    """By device that a way between it and the root leads to, the way's seconds of latency.

    ``child``: which end of an edge is the farther one from the root.
    """
    after: dict[str, list[Edge]] = {}
    for edge in edges:
        after.setdefault(edge[1 - child], []).append(edge)
    reached = {root: 0.0}
    waiting = [root]
    while waiting:
        at = waiting.pop()
        for edge in after.get(at, ()):
            if edge[child] not in reached:
                reached[edge[child]] = reached[at] + latency_s.get(edge, 0.0)
                waiting.append(edge[child])
    return reached


def edge_waits(tree: CheckedRoute, byte_s: Callable[[Edge], float]) -> Iterator[tuple[Edge, float, float]]:
    """By edge, what a byte takes on the longest ways before and after it, over all replicas that are ends.

    A way up begins, and a way down ends, with an edge that is left out.
    """
    up = [way[::-1] for way in _ways(tree.up, tree.root, 0)]
    down = _ways(tree.down, tree.root, 1)
    taken = {edge: byte_s(edge) for way in (*up, *down) for edge in way}

    def longest(ways: Iterable[Sequence[Edge]]) -> float:
        return max((math.fsum(taken[edge] for edge in way) for way in ways), default=0.0)

    up_s, down_s = longest(way[1:] for way in up), longest(way[:-1] for way in down)
    for edge in tree.up:
        through = [(way, way.index(edge)) for way in up if edge in way]
        before_s = longest(way[1:at] for way, at in through)
        yield edge, before_s, longest([through[0][0][through[0][1] + 1 :]]) + down_s
    for edge in tree.down:
        through = [(way, way.index(edge)) for way in down if edge in way]
        after_s = longest(way[at + 1 : -1] for way, at in through)
        yield edge, up_s + longest([through[0][0][: through[0][1]]]), after_s


def _ways(edges: Sequence[Edge], root: str, child: int) -> list[list[Edge]]:
    """By device but the root, the edges between the root and it, the one at the root first."""
    way = {edge[child]: edge for edge in edges}
    ways = []
    for edge in edges:
        passed = [edge]
        while passed[-1][1 - child] != root:
            passed.append(way[passed[-1][1 - child]])
        ways.append(passed[::-1])
    return ways
