"""Routes without the ranks that have left: who was sent to by them is sent to by those behind them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from skyctl.worker.rank_order import RoutePlace, RouteTree

Edge = tuple[int, int]


def routes_among(
    routes: Sequence[RouteTree], members: Collection[int], joined: Collection[int] = ()
) -> list[RouteTree]:
    """The routes, over these ranks alone; each keeps its share.

    Args:
        joined: members that were on no route: they exchange with its root.
    """
    left = []
    for route in routes:
        lost = {route.root, *(end for edge in route.up for end in edge)} - set(members)
        for rank in sorted(lost):
            route = _without(route, rank)  # noqa: PLW2901 — one after another
        root, *others = sorted(joined) if route.root in lost else (route.root, *sorted(joined))
        up = (*route.up, *((rank, root) for rank in others))
        down = (*route.down, *((root, rank) for rank in others))
        left.append(RouteTree(route.share, root, up, down))
    return left


def place_on(route: RouteTree, rank: int) -> RoutePlace:
    """A rank's place on a route."""
    up_parents = [parent for child, parent in route.up if child == rank]
    down_parents = [parent for parent, child in route.down if child == rank]
    return RoutePlace(
        share=route.share,
        up_children=tuple(child for child, parent in route.up if parent == rank),
        up_parent=up_parents[0] if up_parents else None,
        down_parent=down_parents[0] if down_parents else None,
        down_children=tuple(child for parent, child in route.down if parent == rank),
    )


def _without(route: RouteTree, rank: int) -> RouteTree:
    """The route without one rank; where it was the root, its first child is that then."""
    if rank != route.root:
        return RouteTree(route.share, route.root, _spliced(route.up, rank), _spliced_down(route.down, rank))
    children = [child for child, parent in route.up if parent == rank]
    if not children:
        return route
    root = children[0]
    up = tuple((child, root if parent == rank else parent) for child, parent in route.up if child != root)
    down = tuple(
        (root if parent == rank else parent, child) for parent, child in _spliced_down(route.down, root)
    )
    return RouteTree(route.share, root, up, down)


def _spliced(up: Sequence[Edge], rank: int) -> tuple[Edge, ...]:
    """(child, parent) edges in which the rank's children send to its parent."""
    parent_of = dict(up)
    return tuple(
        (child, parent_of[rank] if parent == rank else parent) for child, parent in up if child != rank
    )


def _spliced_down(down: Sequence[Edge], rank: int) -> tuple[Edge, ...]:
    """(parent, child) edges in which the rank's parent sends to its children."""
    turned = _spliced([(child, parent) for parent, child in down], rank)
    return tuple((parent, child) for child, parent in turned)
