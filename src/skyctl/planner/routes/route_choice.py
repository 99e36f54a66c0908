"""Few routes out of a packing's many trees, and the same with trees that are less deep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from skyctl.planner.linear_programs import SharesProgram
from skyctl.planner.routes.route_network import Pair, ResourcePricing, RouteNetwork, RouteShare, Tree
from skyctl.planner.routes.tree_packing import Packing

SMALL_SHARE = 0.05
"""A route with less is left out where that costs at most ``SMALL_LOSS``."""
SMALL_LOSS = 1e-3
NO_LOSS = 1e-10
MOST_DEPTHS = 8
MANY_DEVICES = 16
"""Above, trees of two depths are tried beside the packing's own, as each linear program takes long."""
MOST_TREES = 400
"""Trees that are shared among at a time, those of the packing's own routes before others."""

WORTH = 1e6
"""A tree that takes so many times as long as the quickest has no share that counts."""


def route_choices(
    network: RouteNetwork, packing: Packing, edge_s: Callable[[Pair], float] = lambda _: 1.0
) -> Iterator[tuple[RouteShare, ...]]:
    """Routes from the shallowest trees to the packing's own, each set faster in bytes than the one before.

    A message passes one edge after another, so what deep trees gain in bytes they lose in latency; which of
    the sets is best depends on how many bytes there are.

    Args:
        edge_s: by edge, what a message takes on it.
    """
    chooser = _Chooser(network)
    own = [route.tree for route in packing.routes]
    mine = set(own)
    pool = [*own, *(tree for tree in packing.pool if tree not in mine)][:MOST_TREES]
    depths = {tree: tree_depth(tree, edge_s) for tree in pool}
    deepest = max(depths[tree] for tree in own)
    least_s = math.inf
    below = sorted({x for x in depths.values() if x < deepest * (1 - NO_LOSS)})
    most = MOST_DEPTHS if network.count <= MANY_DEVICES else 2
    for depth in below[:: -(-len(below) // most) or 1]:
        routes, byte_s = chooser.share([tree for tree in pool if depths[tree] <= depth])
        if byte_s < least_s * (1 - SMALL_LOSS):
            least_s = byte_s
            yield chooser.thin(routes, byte_s)
        if byte_s <= packing.byte_s * (1 + NO_LOSS):
            return
    yield chooser.thin(packing.routes, packing.byte_s)


def tree_depth(tree: Tree, edge_s: Callable[[Pair], float] = lambda _: 1.0) -> float:
    """The longest way up to the root and the longest way down, together, as sums over their edges."""
    return _height(tree.up, 0, edge_s) + _height(tree.down, 1, edge_s)


def _height(edges: Sequence[Pair], child: int, edge_s: Callable[[Pair], float]) -> float:
    way = {edge[child]: edge for edge in edges}
    most = 0.0
    for node in way:
        at, taken = node, 0.0
        while at in way:
            taken += edge_s(way[at])
            at = way[at][1 - child]
        most = max(most, taken)
    return most


class _Chooser:
    """Best shares of given trees."""

    def __init__(self, network: RouteNetwork) -> None:
        self._pricing = ResourcePricing(network)

    def share(self, trees: Sequence[Tree]) -> tuple[tuple[RouteShare, ...], float]:
        """(routes with the least seconds a byte, those seconds)."""
        uses = [self._pricing.use_of(tree) for tree in trees]
        most = [float(use.seconds.max(initial=0.0)) for use in uses]
        least_s = min(most)
        quickest = (RouteShare(1.0, trees[most.index(least_s)]),)
        if least_s <= 0:
            return quickest, 0.0
        worth = [k for k, seconds in enumerate(most) if seconds <= WORTH * least_s]
        program = SharesProgram(least_s)
        for k in worth:
            program.add(uses[k].resources, uses[k].seconds)
        solved = program.solve()
        if solved is None:  # numbers too far apart for the solver: what is known is as good as one tree
            return quickest, least_s
        routes = tuple(RouteShare(float(x), trees[k]) for x, k in zip(solved[0], worth, strict=True) if x > 0)
        return routes, self._pricing.busiest_byte_s(routes)

    def thin(self, routes: Sequence[RouteShare], byte_s: float) -> tuple[RouteShare, ...]:
        """Fewer routes, without those that gain nothing, or hardly anything with a small share.

        ``byte_s``: what the routes take.
        """
        kept = tuple(routes)
        for route in sorted(routes, key=lambda route: route.share):
            rest = [other.tree for other in kept if other.tree != route.tree]
            if not rest or len(rest) == len(kept):
                continue
            loss = SMALL_LOSS if route.share < SMALL_SHARE else NO_LOSS
            fewer, taken_s = self.share(rest)
            if taken_s <= byte_s * (1 + loss):
                kept = fewer
        return tuple(sorted(kept, key=lambda route: (-route.share, route.tree)))
