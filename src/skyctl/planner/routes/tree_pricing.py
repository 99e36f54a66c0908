"""The cheapest tree for each root at given prices: exact without helpers and with few, else with a bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np

from skyctl.planner.routes.arborescence import Floats, cheapest_arborescence
from skyctl.planner.routes.route_network import EdgeCosts, Pair, RouteNetwork, Tree
from skyctl.planner.routes.steiner_bound import steiner_bound

MOST_HELPERS = 4
"""Helpers up to which every subset of them is looked at."""


class PricedTree(NamedTuple):
    """A tree, what it costs, and what no tree of that root costs less than (equal where it is exact)."""

    tree: Tree
    cost: float
    bound: float


def cheapest_tree(network: RouteNetwork, costs: EdgeCosts, root: int) -> PricedTree | None:
    """The cheapest tree found with that root; None: it can't be reached from all replicas, or reach them."""
    up = _half(network, costs.up.T, root)
    down = _half(network, costs.down, root)
    if up is None or down is None:
        return None
    tree = Tree(root, tuple(sorted((v, p) for p, v in up.edges)), tuple(sorted(down.edges)))
    return PricedTree(tree, up.cost + down.cost, up.bound + down.bound)


class _Half(NamedTuple):
    """Edges (parent, child), their cost, and a lower bound of what any such edges cost."""

    edges: tuple[Pair, ...]
    cost: float
    bound: float


def _half(network: RouteNetwork, costs: Floats, root: int) -> _Half | None:
    """The cheapest edges away from the root, to all replicas, over helpers where they make it cheaper."""
    helpers = [d for d in network.helpers if d != root]
    needed = tuple(sorted({*network.replicas, root}))
    if len(helpers) <= MOST_HELPERS:
        best = _spanning(costs, needed, root)
        if best is not None and helpers and best.cost <= steiner_bound(costs, root, needed):
            return best
        for chosen in chain.from_iterable(combinations(helpers, k + 1) for k in range(len(helpers))):
            half = _spanning(costs, (*needed, *chosen), root)
            best = half if best is None or (half is not None and half.cost < best.cost) else best
        return best
    return _grown(costs, needed, helpers, root)


def _grown(costs: Floats, needed: tuple[int, ...], helpers: Sequence[int], root: int) -> _Half | None:
    """The helper that saves most is added, again and again; the bound is that of a dual ascent."""
    best = _spanning(costs, (*needed, *helpers), root)  # its leaves are cut: a beginning where others fail
    direct = _spanning(costs, needed, root)
    chosen: tuple[int, ...] = ()
    if direct is not None:
        best = direct if best is None or direct.cost <= best.cost else best
        while True:
            more = [(*chosen, d) for d in helpers if d not in chosen]
            halves = [(half, x) for x in more if (half := _spanning(costs, (*needed, *x), root))]
            if not halves or (least := min(halves, key=lambda pair: pair[0].cost))[0].cost >= best.cost:
                break
            best, chosen = least
    if best is None:
        return None
    return best._replace(bound=min(best.cost, steiner_bound(costs, root, needed)))


def _spanning(costs: Floats, nodes: Sequence[int], root: int) -> _Half | None:
    """The cheapest tree over just these nodes; helpers at its ends are left off."""
    at = np.array(nodes)
    arborescence = cheapest_arborescence(costs[np.ix_(at, at)], list(nodes).index(root))
    if arborescence is None:
        return None
    edges = tuple((int(at[p]), int(at[v])) for v, p in enumerate(arborescence.parents) if p >= 0)
    cost = sum(float(costs[edge]) for edge in edges)
    return _Half(edges, cost, min(cost, arborescence.cost))


def without_idle_leaves(tree: Tree, replicas: Iterable[int]) -> Tree:
    """The tree without helpers at its ends, which would add and pass on nothing."""
    keep = {*replicas, tree.root}
    return Tree(tree.root, _pruned(tree.up, keep, 0), _pruned(tree.down, keep, 1))


def _pruned(edges: tuple[Pair, ...], keep: set[int], child: int) -> tuple[Pair, ...]:
    while True:
        parents = {edge[1 - child] for edge in edges}
        left = tuple(edge for edge in edges if edge[child] in keep or edge[child] in parents)
        if len(left) == len(edges):
            return edges
        edges = left
