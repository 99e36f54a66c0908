"""The names of routes: a ring, a star, or trees if they are neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from skyctl.records.sync import Route

RoutesKind = Literal["ring", "two-way ring", "star", "stars", "tree", "trees"]
EQUAL_SHARES = 1e-6


class RoutesName(NamedTuple):
    """The kind of routes, and the replicas: around a ring, else the root of the largest share first."""

    kind: RoutesKind
    devices: tuple[str, ...]


def name_routes(routes: Sequence[Route]) -> RoutesName:
    """A ring one way, or both ways, around the same order; stars; or trees.

    In a ring every replica is a root, with equal shares each way. Two replicas' one route is a star.
    """
    largest = max(routes, key=lambda route: route.share)
    if all(_is_star(route) for route in routes):
        roots = tuple(route.root for route in sorted(routes, key=lambda route: -route.share))
        return RoutesName("star" if len(routes) == 1 else "stars", roots)
    around = [_cycle(route) for route in routes]
    if all(around):
        ways = {way: [x for x, at in zip(routes, around, strict=True) if at == way] for way in set(around)}
        first = around[0]
        assert first is not None
        same = set(ways) <= {first, _turned(first[:1] + first[:0:-1])}
        if same and all(_is_whole(ring, len(first)) for ring in ways.values()):
            return RoutesName("ring" if len(ways) == 1 else "two-way ring", first)
    return RoutesName("tree" if len(routes) == 1 else "trees", (largest.root,))


def _is_star(route: Route) -> bool:
    return all(route.root in edge for edge in (*route.up, *route.down))


def _cycle(route: Route) -> tuple[str, ...] | None:
    """The replicas in the order in which a ring's route goes around; None: it is no part of a ring."""
    after = {edge[0]: edge[1] for edge in route.down}
    if len(after) < len(route.down):
        return None
    order = [route.root]
    while order[-1] in after:
        order.append(after[order[-1]])
    around = set(zip(order, [*order[1:], order[0]], strict=True))
    return _turned(tuple(order)) if {(edge[0], edge[1]) for edge in route.up} <= around else None


def _turned(order: tuple[str, ...]) -> tuple[str, ...]:
    """The same cycle, beginning with the least name."""
    at = order.index(min(order))
    return order[at:] + order[:at]


def _is_whole(ring: Sequence[Route], count: int) -> bool:
    """Whether each replica is a root once, all with the same share."""
    shares = [route.share for route in ring]
    return len({route.root for route in ring}) == len(ring) == count and (
        max(shares) - min(shares) < EQUAL_SHARES
    )
