"""A lower bound on the cheapest tree from a root to some of the nodes (Wong's dual ascent, 1984)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from skyctl.planner.routes.arborescence import Floats


def steiner_bound(costs: Floats, root: int, terminals: Iterable[int]) -> float:
    """A lower bound on the cost of trees from ``root`` to all ``terminals``; infinite if there is no tree.

    The edges into a set of nodes that holds a terminal and not the root cost at least as much as the cheapest
    of them, which is paid, and taken off all of them, until every terminal is reached over edges that cost
    nothing more.

    Args:
        costs: [source, target], none negative; infinite where there is no edge.
    """
    left = costs.copy()
    np.fill_diagonal(left, np.inf)
    paid = 0.0
    for terminal in terminals:
        while True:
            behind = _behind(left, terminal)
            if behind[root]:
                break
            into = left[np.ix_(~behind, behind)]
            least = float(into.min(initial=np.inf))
            if least == np.inf:
                return np.inf
            paid += least
            left[np.ix_(~behind, behind)] = into - least
    return paid


def _behind(left: Floats, terminal: int) -> np.ndarray:
    """By node, whether it reaches the terminal over edges that cost nothing more."""
    free = left <= 0
    reached = np.zeros(len(left), dtype=bool)
    reached[terminal] = True
    while True:
        more = reached | free[:, reached].any(axis=1)
        if (more == reached).all():
            return reached
        reached = more
