"""Trees to begin with: stars, rings, and for every root the quickest ways to all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from skyctl.planner.routes.arborescence import Floats
from skyctl.planner.routes.route_network import Pair, RouteNetwork, Tree


def simple_trees(network: RouteNetwork) -> list[Tree]:
    """A star at each device, and a ring in the replicas' order both ways around, where links exist."""
    trees = []
    for root in range(network.count):
        others = [d for d in network.replicas if d != root]
        trees.append(Tree(root, tuple((d, root) for d in others), tuple((root, d) for d in others)))
    for order in (network.replicas, network.replicas[::-1]):
        trees += ring_trees(order)
    return [tree for tree in trees if all(edge in network.link_byte_s for edge in (*tree.up, *tree.down))]


def ring_trees(order: Sequence[int]) -> list[Tree]:
    """The trees of a ring in that order, one for each root: once around to it, and once around from it."""
    trees = []
    for i, root in enumerate(order):
        after = [*order[i + 1 :], *order[:i]]
        up, down = sorted(pairwise([*after, root])), sorted(pairwise([root, *after]))
        trees.append(Tree(root, tuple(up), tuple(down)))
    return trees


def quickest_trees(network: RouteNetwork, edge_s: Callable[[Pair], float]) -> list[Tree]:
    """By root, the tree of the quickest ways from all devices and to them, where there are such ways.

    ``edge_s``: what a message takes over a link.
    """
    taken_s = np.full((network.count, network.count), np.inf)
    for pair in network.link_byte_s:
        taken_s[pair] = edge_s(pair)
    trees = []
    for root in range(network.count):
        up, down = _quickest(taken_s.T, root), _quickest(taken_s, root)
        if up is not None and down is not None:
            trees.append(Tree(root, tuple(sorted((c, p) for p, c in up)), tuple(sorted(down))))
    return trees


def _quickest(taken_s: Floats, root: int) -> list[Pair] | None:
    """The edges (parent, child) of the shortest ways from the root (Dijkstra 1959); None: some have none."""
    count = len(taken_s)
    away_s = np.full(count, np.inf)
    away_s[root] = 0.0
    parents = np.full(count, -1)
    left = np.ones(count, dtype=bool)
    for _ in range(count):
        at = int(np.where(left, away_s, np.inf).argmin())
        if away_s[at] == np.inf or not left[at]:
            return None
        left[at] = False
        over_s = away_s[at] + taken_s[at]
        sooner = left & (over_s < away_s)
        away_s[sooner], parents[sooner] = over_s[sooner], at
    return [(int(parents[d]), d) for d in range(count) if d != root]
