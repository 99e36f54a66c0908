"""The least seconds a byte to sum and hand back: shares of trees by column generation, and a lower bound.

A linear program shares all bytes among the trees that are known, so that the busiest resource is busy as
briefly as possible. Its prices say which tree would be cheapest for each root; where one is cheaper than the
program's value, it is added. Any prices prove a bound: no routes use less, weighted by price, than the
cheapest tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from skyctl.errors import InputError
from skyctl.planner.linear_programs import SharesProgram
from skyctl.planner.routes.quick_trees import simple_trees
from skyctl.planner.routes.route_network import (
    EdgeCosts,
    Floats,
    ResourcePricing,
    ResourceUse,
    RouteNetwork,
    RouteShare,
    Tree,
)
from skyctl.planner.routes.tree_pricing import PricedTree, cheapest_tree, without_idle_leaves

CLOSED = 1e-10
"""Relative: value and bound that are no further apart are the same."""
MOST_ROOTS = 16
"""Replicas up to which trees of every root are looked for each time; above, of a few."""
FEW_ROOTS = 4
SMOOTHING = 0.6
"""Part of the best prices so far in those that trees are looked for at, where roots are many."""


@dataclass(frozen=True)
class Packing:
    """Trees with their shares, and what is proved.

    Attributes:
        routes: only those with a share.
        byte_s: seconds that a byte takes on the busiest resource.
        bound_byte_s: what no routes can be faster than.
        prices: by resource, 1 in all, that prove the bound; none where it is 0.
        pool: every tree that was found on the way.
    """

    routes: tuple[RouteShare, ...]
    byte_s: float
    bound_byte_s: float
    prices: dict[int, float]
    pool: tuple[Tree, ...]

    @property
    def gap(self) -> float:
        """``byte_s`` ÷ ``bound_byte_s`` − 1."""
        return self.byte_s / self.bound_byte_s - 1 if self.bound_byte_s > 0 else 0.0


def pack_trees(
    network: RouteNetwork,
    deadline: float,
    *,
    first_trees: Iterable[Tree] = (),
    gap: float = 0.0,
) -> Packing:
    """Routes with the least seconds a byte among two replicas or more.

    Args:
        deadline: when to take the best so far, in seconds of ``time.perf_counter``.
        first_trees: trees to begin with, beside stars and a ring.
        gap: relative; how far from the bound is near enough.

    Raises:
        InputError: links do not join the replicas, not even over helpers, in both directions.
    """
    search = _Search(network)
    search.begin(first_trees)
    while search.improve(gap) and time.perf_counter() < deadline:
        pass
    return search.packing()


class _Search:
    """Trees so far with their best shares, and the best bound so far."""

    def __init__(self, network: RouteNetwork) -> None:
        self.network = network
        self.pricing = ResourcePricing(network)
        self.pool: list[Tree] = []
        self.uses: list[ResourceUse] = []
        self.shares = np.zeros(0)
        self.byte_s = np.inf
        self.bound_byte_s = 0.0
        self.prices = np.zeros(network.resources)
        self._seen: set[Tree] = set()
        self._program: SharesProgram | None = None
        self._exact = np.zeros(network.resources)  # the program's own prices
        self._stuck = False
        roots = [*network.replicas, *network.helpers]
        self._roots = roots
        self._active = roots if len(roots) <= MOST_ROOTS else []

    def begin(self, first_trees: Iterable[Tree]) -> None:
        """The first trees: those given, stars and a ring where there are their links, and cheap ones."""
        network = self.network
        costs = self.pricing.edge_costs(np.full(network.resources, 1 / network.resources))
        priced = self._price(costs, self._roots)
        if not priced:
            raise InputError(
                "the links do not join all devices that sum, there and back",
                hint="every one needs a way to every other; probe the missing links, or leave devices out",
            )
        if not self._active:
            priced.sort(key=lambda priced_tree: priced_tree.cost)
            self._active = [priced_tree.tree.root for priced_tree in priced[:FEW_ROOTS]]
        for tree in (*first_trees, *simple_trees(network), *(priced_tree.tree for priced_tree in priced)):
            self._add(tree)
        self._solve()

    def improve(self, gap: float) -> bool:
        """Looks for cheaper trees at the program's prices; whether there may be better ones."""
        if self._stuck or self.byte_s <= 0 or self.byte_s <= self.bound_byte_s * (1 + max(gap, CLOSED)):
            return False
        exact = self._exact
        mixed = exact
        if self.bound_byte_s > 0 and len(self._roots) > MOST_ROOTS:
            mixed = SMOOTHING * self.prices + (1 - SMOOTHING) * exact
        for prices in (mixed, exact) if mixed is not exact else (exact,):
            if self._look_at(prices, self._active):
                return self._solve()
        others = [root for root in self._roots if root not in self._active]
        if others and (new_roots := self._look_at(exact, self._roots)):
            self._active = [*self._active, *new_roots]
            return self._solve()
        return False

    def packing(self) -> Packing:
        """The trees packed so far with their shares, and the bound on any packing."""
        if len(self._active) < len(self._roots) and self.byte_s > 0 and not self._stuck:
            self._look_at(self._exact, self._roots)
        routes = tuple(
            RouteShare(float(share), tree)
            for share, tree in zip(self.shares, self.pool, strict=False)
            if share > 0
        )
        prices = {int(r): float(self.prices[r]) for r in np.flatnonzero(self.prices)}
        bound = min(self.bound_byte_s, self.byte_s)
        return Packing(routes, self.byte_s, bound, prices if bound > 0 else {}, tuple(self.pool))

    def _look_at(self, prices: Floats, roots: Sequence[int]) -> list[int]:
        """Adds trees that are cheaper at the program's own prices than its value; their new roots.

        If it looks at all roots, the bound is the cost of the cheapest of all trees.
        """
        priced = self._price(self.pricing.edge_costs(prices), roots)
        if len(roots) == len(self._roots):
            bound = min((priced_tree.bound for priced_tree in priced), default=0.0) / float(prices.sum())
            if bound > self.bound_byte_s:
                self.bound_byte_s, self.prices = bound, prices / prices.sum()
        new_roots = []
        for priced_tree in sorted(priced, key=lambda priced_tree: priced_tree.cost):
            use = self.pricing.use_of(priced_tree.tree)
            cost = float(self._exact[use.resources] @ use.seconds)
            if cost < self.byte_s * (1 - CLOSED) and self._add(priced_tree.tree, use):
                new_roots.append(priced_tree.tree.root)
        return new_roots

    def _price(self, costs: EdgeCosts, roots: Sequence[int]) -> list[PricedTree]:
        trees = [cheapest_tree(self.network, costs, root) for root in roots]
        return [tree for tree in trees if tree is not None]

    def _add(self, tree: Tree, use: ResourceUse | None = None) -> bool:
        """Adds a tree as a column of the linear program; False: it is one already."""
        if self.network.helpers:
            tree, use = without_idle_leaves(tree, self.network.replicas), None
        if tree in self._seen:
            return False
        self._seen.add(tree)
        use = use or self.pricing.use_of(tree)
        self.pool.append(tree)
        self.uses.append(use)
        if self._program is not None:
            self._program.add(use.resources, use.seconds)
        return True

    def _solve(self) -> bool:
        """Finds the best shares of the trees so far, and their prices; whether it could be solved."""
        if self._program is None:
            most = [float(use.seconds.max(initial=0.0)) for use in self.uses]
            self._take(np.eye(len(most))[int(np.argmin(most))])
            if self.byte_s <= 0:  # a tree that takes no time at all
                return True
            self._program = SharesProgram(self.byte_s)
            for use in self.uses:
                self._program.add(use.resources, use.seconds)
        solved = self._program.solve()
        if solved is None or not sum(solved[1].values()) > 0:
            self._stuck = True
            return False
        shares, prices = solved
        exact = np.zeros(self.network.resources)
        exact[list(prices)] = list(prices.values())
        self._exact = exact / exact.sum()
        self._take(shares)
        return True

    def _take(self, shares: Floats) -> None:
        """The shares are taken where they are the best so far."""
        loads = np.zeros(self.network.resources)
        for share, use in zip(shares, self.uses, strict=True):
            loads[use.resources] += share * use.seconds
        byte_s = float(loads.max())
        if byte_s <= self.byte_s:
            self.shares, self.byte_s = shares, byte_s
