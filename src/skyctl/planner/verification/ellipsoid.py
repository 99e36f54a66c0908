"""Minimises a convex function of a few unknowns, by the ellipsoid method with deep cuts.

Source: Shor 1977, Yudin and Nemirovski 1976; the update as in Bland, Goldfarb and Todd 1981. Every step
shrinks the ellipsoid that holds the minimum by a fixed factor, so the time needed is known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from skyctl.planner.verification.facts import Array


def minimise(
    function: Callable[[Array], tuple[float, Array]],
    centre: Array,
    radius: float,
    enough: float,
    precision: float = 1e-4,
    steps: int = 20_000,
) -> tuple[float, Array]:
    """(least value found, its point). Stops at a value below ``enough``, or within ``precision`` of the least
    in the ball of that radius, or after that many steps.

    Args:
        function: gives a value and a subgradient.
    """
    n = len(centre)
    best, where = np.inf, centre
    shape = np.eye(n) * radius**2
    for _ in range(steps):
        value, slope = function(centre)
        if value < best:
            best, where = value, centre
        across = shape @ slope
        width = max(0.0, float(slope @ across)) ** 0.5
        if best < enough or width == 0 or value - width > best - precision:
            break
        depth = (value - best) / width
        across = across / width
        if n == 1:
            centre = centre - across * (1 + depth) / 2
            shape = shape * ((1 - depth) / 2) ** 2
            continue
        centre = centre - across * (1 + n * depth) / (n + 1)
        shape = (n * n * (1 - depth**2) / (n * n - 1)) * (
            shape - np.outer(across, across) * 2 * (1 + n * depth) / ((n + 1) * (1 + depth))
        )
        shape = (shape + shape.T) / 2
    return float(best), where
