"""Prices and shares by linear programs (GLOP, of OR-Tools).

Deadlines are by ``time.perf_counter``, in seconds. A program's answers serve only as prices and shares;
the planner computes what these prove from the problem's own numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_S = 1e6
"""Time limit of a program that has no deadline."""


class CuttingPlanes:
    """The least of a convex function of few variables, within ± ``box`` each, by tangents (Kelley 1960)."""

    def __init__(self, variables: int, box: float) -> None:
        from ortools.linear_solver import pywraplp

        self._lp: Any = pywraplp.Solver.CreateSolver("GLOP")
        self._top = self._lp.NumVar(-self._lp.infinity(), self._lp.infinity(), "top")
        self._point = [self._lp.NumVar(-box, box, f"x{i}") for i in range(variables)]
        self._lp.Minimize(self._top)

    def add(self, constant: float, slope: Floats) -> None:
        """Adds a tangent: the function is at least ``constant + slope · x``."""
        row = self._lp.Constraint(float(constant), self._lp.infinity())
        row.SetCoefficient(self._top, 1.0)
        for x, weight in zip(self._point, slope.tolist(), strict=True):
            row.SetCoefficient(x, -weight)

    def least(self) -> tuple[float, Floats] | None:
        """(a lower bound on the function, where it is reached by the tangents), or None: no solution."""
        if self._lp.Solve() != self._lp.OPTIMAL:
            return None
        return self._top.solution_value(), np.array([x.solution_value() for x in self._point])


class TakenPrices:
    """The prices of layers, 1 in all, for which all devices together can take least, by cutting planes.

    A device takes the prices of layers that it can hold; a cut is a lower bound on that, for one class.

    Args:
        sizes: by class, how many devices it has.
        starts: by range of layers, its first; ``stops``: the one after its last.
        layers: how many there are.
    """

    def __init__(self, sizes: Ints, starts: Ints, stops: Ints, layers: int) -> None:
        from ortools.linear_solver import pywraplp

        self._starts, self._stops = starts, stops
        self._lp: Any = pywraplp.Solver.CreateSolver("GLOP")
        self._prefix = [self._lp.NumVar(0.0, 1.0, "") for _ in range(layers + 1)]
        self._lp.Add(self._prefix[0] == 0)
        self._lp.Add(self._prefix[-1] == 1)
        for i in range(layers):
            self._lp.Add(self._prefix[i + 1] - self._prefix[i] >= 0)
        self._most = [self._lp.NumVar(0.0, self._lp.infinity(), "") for _ in sizes]
        goal = self._lp.Objective()
        goal.SetMinimization()
        for most, size in zip(self._most, sizes.tolist(), strict=True):
            goal.SetCoefficient(most, float(size))

    def add(self, cut: tuple[int, int, float]) -> None:
        """Of ``cut``, (class, range, times): a device takes at least that range's prices, so many times."""
        row, number, count = cut
        at = self._lp.Constraint(0.0, self._lp.infinity())
        at.SetCoefficient(self._most[row], 1.0)
        at.SetCoefficient(self._prefix[int(self._stops[number])], -count)
        at.SetCoefficient(self._prefix[int(self._starts[number])], count)

    def solve(self, deadline: float) -> tuple[float, Floats] | None:
        """(what all devices take, the price of each layer); None: out of time."""
        if not _solved(self._lp, deadline):
            return None
        return self._lp.Objective().Value(), np.diff([x.solution_value() for x in self._prefix])


def fractional_prices(
    times: Floats, needs: Floats, classes: Sequence[tuple[int, int, float]], deadline: float
) -> Floats | None:
    """Prices of layers from the linear program that cuts layers anywhere: the least T with every device's
    time within T and its memory kept. Layers that are alike are one. One price a layer; None: out of time.

    Args:
        times: [timing, layer] seconds.
        needs: [layer] bytes.
        classes: of alike devices, (how many, their timing, their bytes).
    """
    from ortools.linear_solver import pywraplp

    lp: Any = pywraplp.Solver.CreateSolver("GLOP")
    scale = float(times.sum(axis=1).mean()) / sum(size for size, _, _ in classes) or 1.0
    columns, first, index = np.unique(
        np.vstack((times, needs)), axis=1, return_index=True, return_inverse=True
    )[0:3]
    count = np.bincount(index.ravel(), minlength=len(first))
    limit = lp.NumVar(0.0, lp.infinity(), "limit")
    lp.Minimize(limit)
    covered = [lp.Constraint(1.0, lp.infinity()) for _ in range(len(first))]
    for size, timing, cap in classes:
        time_row = lp.Constraint(0.0, lp.infinity())
        time_row.SetCoefficient(limit, float(size))
        memory_row = lp.Constraint(0.0, size * 1.0) if 0 < cap < np.inf else None
        for i in range(len(first)):
            x = lp.NumVar(0.0, lp.infinity() if cap > 0 else 0.0, "")
            covered[i].SetCoefficient(x, 1.0)
            time_row.SetCoefficient(x, -float(columns[timing, i] * count[i] / scale))
            if memory_row is not None:
                memory_row.SetCoefficient(x, float(columns[-1, i] * count[i] / cap))
    if not _solved(lp, deadline):
        return None
    prices = np.array([max(0.0, row.dual_value()) for row in covered]) / count
    out: Floats = prices[index.ravel()]
    return out


def range_prices(sizes: list[int], far: Ints, deadline: float) -> Floats | None:
    """The prices, one a layer, 1 in all, for which all devices together can take least: of the largest ranges
    [start, far) of each class the dearest counts. None: out of time.

    Args:
        sizes: how many devices each class has.
        far: [class, start 0 … L] the largest stop.
    """
    from ortools.linear_solver import pywraplp

    lp: Any = pywraplp.Solver.CreateSolver("GLOP")
    prefix = [lp.NumVar(0.0, 1.0, "") for _ in range(far.shape[1])]
    lp.Add(prefix[0] == 0)
    lp.Add(prefix[-1] == 1)
    for before, after in pairwise(prefix):
        lp.Add(after - before >= 0)
    goal = lp.Objective()
    goal.SetMinimization()
    for row, size in enumerate(sizes):
        most = lp.NumVar(0.0, 1.0, "")
        goal.SetCoefficient(most, float(size))
        for start in range(far.shape[1] - 1):
            stop = int(far[row, start])
            if stop > start and (start == 0 or stop > far[row, start - 1]):
                lp.Add(most - prefix[stop] + prefix[start] >= 0)
    if not _solved(lp, deadline):
        return None
    out: Floats = np.maximum(0.0, np.diff([x.solution_value() for x in prefix]))
    return out


def _solved(lp: Any, deadline: float) -> bool:
    left = min(deadline - time.perf_counter(), MOST_S)
    if left <= 0:
        return False
    lp.SetTimeLimit(max(1, int(left * 1000)))
    return bool(lp.Solve() == lp.OPTIMAL)


def position_prices(takes: Floats, sizes: list[int]) -> Floats | None:
    """Prices of the places where devices are assigned to places, one each, so that they take most in all.

    Args:
        takes: [class, place] what one device of the class can take there.
        sizes: how many devices each class has.
    """
    from ortools.linear_solver import pywraplp

    lp: Any = pywraplp.Solver.CreateSolver("GLOP")
    places = [lp.NumVar(0.0, lp.infinity(), "") for _ in range(takes.shape[1])]
    goal = lp.Objective()
    goal.SetMinimization()
    for place in places:
        goal.SetCoefficient(place, 1.0)
    for size, row in zip(sizes, takes.tolist(), strict=True):
        own = lp.NumVar(0.0, lp.infinity(), "")
        goal.SetCoefficient(own, float(size))
        for place, most in zip(places, row, strict=True):
            if most > 0:
                constraint = lp.Constraint(most, lp.infinity())
                constraint.SetCoefficient(own, 1.0)
                constraint.SetCoefficient(place, 1.0)
    if lp.Solve() != lp.OPTIMAL:
        return None
    out: Floats = np.maximum(0.0, np.array([place.solution_value() for place in places]))
    return out


class SharesProgram:
    """Shares of columns, 1 in all, with the least load on the busiest resource; columns are added one by one.

    Args:
        scale: about the load that is expected, by which loads are divided.
    """

    def __init__(self, scale: float) -> None:
        from ortools.linear_solver import pywraplp

        self._lp: Any = pywraplp.Solver.CreateSolver("GLOP")
        self._lp.SetSolverSpecificParametersAsString(
            "primal_feasibility_tolerance: 1e-10 dual_feasibility_tolerance: 1e-10"
        )
        self._scale = scale
        self._most = self._lp.NumVar(0.0, self._lp.infinity(), "most")
        self._lp.Minimize(self._most)
        self._whole = self._lp.Constraint(1.0, 1.0)
        self._rows: dict[int, Any] = {}
        self._shares: list[Any] = []

    def add(self, resources: Ints, loads: Floats) -> None:
        """A column: the load that all of it puts on each of these resources."""
        share = self._lp.NumVar(0.0, self._lp.infinity(), "")
        self._whole.SetCoefficient(share, 1.0)
        for resource, load in zip(resources.tolist(), loads.tolist(), strict=True):
            row = self._rows.get(resource)
            if row is None:
                row = self._rows[resource] = self._lp.Constraint(-self._lp.infinity(), 0.0)
                row.SetCoefficient(self._most, -1.0)
            row.SetCoefficient(share, load / self._scale)
        self._shares.append(share)

    def solve(self) -> tuple[Floats, dict[int, float]] | None:
        """(the columns' shares, prices of resources, none negative and at most about 1 in all); None: no
        solution."""
        if self._lp.Solve() != self._lp.OPTIMAL:
            return None
        shares = np.array([max(0.0, x.solution_value()) for x in self._shares])
        prices = {resource: max(0.0, -row.dual_value()) for resource, row in self._rows.items()}
        return shares / shares.sum(), prices
