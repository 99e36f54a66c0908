"""Minimises a linear function under many sparse constraints, by a primal-dual interior-point method.

Source: Mehrotra 1992 (predictor and corrector). Rows have at most four entries, so a step is adding up rows
and solving two small dense systems. Whoever uses it judges the points on the way: none needs to be optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from skyctl.planner.verification.problem_data import Array, Ints

MAX_STEPS = 80
CONVERGED = 1e-11
SIGNS = (1.0, 1.0, 1.0, -1.0)
TO_THE_EDGE = 0.995
"""Of the way to where a slack or a multiplier would be zero."""


class Program(NamedTuple):
    """min cost · x, with every row's x[a] + x[b] + x[c] − x[d] ≥ 0.

    Args:
        rows: (a, b, c, d) each.
        free: the unknowns; all other x stay what they are.
    """

    rows: Ints
    free: Ints
    cost: Array


class _Point(NamedTuple):
    """Unknowns, slacks of the rows, multipliers of the rows; or a move of them."""

    x: Array
    s: Array
    z: Array


def points(program: Program, start: Array, above: float) -> Iterator[Array]:
    """Better and better points, until the least is found, or is above that for certain.

    Args:
        start: every row must be above zero there. Unknowns should be about −1 to 1.
    """
    return _Method(program).points(start, above)


class _Method:
    def __init__(self, program: Program) -> None:
        self.rows, self.free, self.cost = program
        width = len(self.cost)
        pairs = [(a, b) for a in range(4) for b in range(a + 1)]
        self.signs = [SIGNS[a] * SIGNS[b] * (0.5 if a == b else 1.0) for a, b in pairs]
        self.cells = np.concatenate([self.rows[:, a] * width + self.rows[:, b] for a, b in pairs])

    def points(self, start: Array, above: float) -> Iterator[Array]:
        s = self._slack(start)
        at = _Point(start, s, float(self.cost @ start) / len(s) / s)
        for _ in range(MAX_STEPS):
            gap = float(at.s @ at.z)
            off = self.cost - self._back(at.z)
            least = float(self.cost @ at.x) - gap - float(abs(off[self.free]).sum())
            if gap < CONVERGED or least > above:
                return
            try:
                move = self._move(at, off, gap)
            except np.linalg.LinAlgError:
                return
            a, b = _reach(at.s, move.s, TO_THE_EDGE), _reach(at.z, move.z, TO_THE_EDGE)
            at = _Point(at.x + a * move.x, at.s + a * move.s, at.z + b * move.z)
            if not np.isfinite(at.x).all():
                return
            yield at.x

    def _move(self, at: _Point, off: Array, gap: float) -> _Point:
        """Newton's step to where slack · multiplier is the same for all rows, and a good deal less."""
        matrix = self._matrix(at.z / at.s)
        first = self._newton(at, off, matrix, -at.s * at.z)
        left = float((at.s + _reach(at.s, first.s) * first.s) @ (at.z + _reach(at.z, first.z) * first.z))
        aim = (left / gap) ** 3 * gap / len(at.s)
        return self._newton(at, off, matrix, aim - at.s * at.z - first.s * first.z)

    def _newton(self, at: _Point, off: Array, matrix: Array, change: Array) -> _Point:
        """Slack · multiplier changes by that, to first order, and what is off no longer is."""
        short = at.s - self._slack(at.x)
        side = self._back((change + at.z * short) / at.s) - off
        x = np.zeros_like(at.x)
        x[self.free] = np.linalg.solve(matrix, side[self.free])
        s = self._slack(x) - short
        return _Point(x, s, (change - at.z * s) / at.s)

    def _slack(self, x: Array) -> Array:
        a, b, c, d = self.rows.T
        out: Array = x[a] + x[b] + x[c] - x[d]
        return out

    def _back(self, z: Array) -> Array:
        """The rows' sum, each so many times."""
        out = np.zeros(len(self.cost))
        for sign, column in zip(SIGNS, self.rows.T, strict=True):
            out += sign * np.bincount(column, z, len(out))
        return out

    def _matrix(self, weight: Array) -> Array:
        """Σ weight · row rowᵀ, of the free unknowns."""
        width = len(self.cost)
        weights = np.concatenate([sign * weight for sign in self.signs])
        half = np.bincount(self.cells, weights, width * width).reshape(width, width)
        half = half[np.ix_(self.free, self.free)]
        out: Array = (half + half.T).astype(np.float64)
        out[np.diag_indices(len(out))] *= 1 + 1e-14
        return out


def _reach(values: Array, change: Array, share: float = 1.0) -> float:
    """How far a step may go, at most 1, until one of the values is zero; or that share of the way."""
    falls = change < 0
    return min(1.0, share * float((-values[falls] / change[falls]).min(initial=np.inf)))


# Minimises a convex function of a few unknowns, by the ellipsoid method with deep cuts.
#
# Source: Shor 1977, Yudin and Nemirovski 1976; the update as in Bland, Goldfarb and Todd 1981. Every step
# shrinks the ellipsoid that holds the minimum by a fixed factor, so the time needed is known beforehand.


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
