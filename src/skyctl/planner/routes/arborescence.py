"""Cheapest arborescences (Edmonds 1967): trees in which a root reaches every node along directed edges.

The dense form in O(n²): a path of nodes, each with its cheapest entering edge, grows until it meets what the
root reaches; a cycle on it becomes one node.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Arborescence(NamedTuple):
    """A tree away from a root: its cost, and by node the node before it (−1 at the root)."""

    cost: float
    parents: tuple[int, ...]


def cheapest_arborescence(costs: Floats, root: int) -> Arborescence | None:
    """The cheapest tree from ``root`` to all nodes; None: some can't be reached.

    Args:
        costs: [source, target], none negative, infinite where there is no edge; the diagonal counts as such.
    """
    count = len(costs)
    growth = _Growth(costs, root)
    for start in range(count):
        if not growth.reach(start):
            return None
    return Arborescence(growth.cost, growth.parents())


class _Growth:
    """Nodes, and cycles of them that have become one; numbers from ``count`` on are cycles.

    Attributes:
        cost: of all edges chosen so far, each less what its node's cycle has already paid.
    """

    def __init__(self, costs: Floats, root: int) -> None:
        self.count, self.root = len(costs), root
        entering = costs.T.copy()
        np.fill_diagonal(entering, np.inf)
        self.cost = 0.0
        self._entering: list[Any] = list(entering)  # by node, the reduced cost of an edge from each node
        self._targets: list[Any] = [None] * self.count  # by cycle, which of its nodes that edge enters
        self._top = np.arange(self.count)  # by node, the outermost cycle that it is in
        self._cycle_of: list[int] = [-1] * self.count
        self._members: list[list[int]] = [[]] * self.count
        self._nodes: list[list[int]] = [[v] for v in range(self.count)]
        self._chosen: list[tuple[int, int]] = [(-1, -1)] * self.count
        self._reached = {root}

    def reach(self, start: int) -> bool:
        """Grows a path from a node backwards until the root's tree is met; whether it is."""
        path = [int(self._top[start])]
        if path[0] in self._reached:
            return True
        while True:
            here = path[-1]
            costs = self._entering[here]
            source = int(costs.argmin())
            cost = float(costs[source])
            if cost == np.inf:
                return False
            self.cost += cost
            costs -= cost
            targets = self._targets[here]
            self._chosen[here] = (source, here if targets is None else int(targets[source]))
            before = int(self._top[source])
            if before in self._reached:
                self._reached.update(path)
                return True
            if before in path:
                at = path.index(before)
                path[at:] = [self._contract(path[at:])]
            else:
                path.append(before)

    def _contract(self, cycle: list[int]) -> int:
        """Makes one node of a cycle's."""
        new = len(self._entering)
        stacked = np.stack([self._entering[m] for m in cycle])
        least = stacked.argmin(axis=0)
        across = np.arange(self.count)
        costs = stacked[least, across]
        heads = np.stack(
            [np.full(self.count, m) if self._targets[m] is None else self._targets[m] for m in cycle]
        )
        nodes = [v for m in cycle for v in self._nodes[m]]
        costs[nodes] = np.inf
        self._top[nodes] = new
        self._entering.append(costs)
        self._targets.append(heads[least, across])
        self._cycle_of.append(-1)
        self._members.append(cycle)
        self._nodes.append(nodes)
        self._chosen.append((-1, -1))
        for member in cycle:
            self._cycle_of[member] = new
        return new

    def parents(self) -> tuple[int, ...]:
        """By node, where its edge comes from, once all are reached: a cycle is opened where it is entered."""
        parents = [-1] * self.count
        left = [x for x in range(len(self._entering)) if self._cycle_of[x] == -1 and x != self.root]
        while left:
            outer = left.pop()
            source, node = self._chosen[outer]
            parents[node] = source
            at = node
            while at != outer:
                cycle = self._cycle_of[at]
                left += [member for member in self._members[cycle] if member != at]
                at = cycle
        return tuple(parents)
