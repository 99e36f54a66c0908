"""OR-Tools, and the only file that imports it: CP-SAT for plans within a limit, linear programs for prices.

All numbers that CP-SAT sees are layer indices, so there is nothing to scale and nothing to round. What the
linear programs say is only used as prices, whose proof is computed from the problem's own numbers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from skyctl.planner.cost_model import CostModel, Placement, StageAssignment

if TYPE_CHECKING:
    from skyctl.planner.bottleneck.reach_table import Floats, Ints, ReachTable
    from skyctl.planner.bottleneck.repeated_layers import StageEdges

MOST_S = 1e6
"""Of a program that has no deadline."""
ClassEdge = tuple[int, int]
"""(class of devices, edge)."""


class IntervalSolver:
    """CP-SAT on one question: is there a plan whose stages all stay within a limit?

    Stages are optional intervals on the axis of layers that do not overlap and fill it. How far a device
    gets from each start is a table, made in floats by the very sums that judge a plan; for 1F1B one table
    per number of stages from there to the end.
    """

    def __init__(self, model: CostModel, deadline: float) -> None:
        self.model = model
        self.deadline = deadline
        self.staged = not model.unlimited and model.schedule in ("1f1b", "eager-1f1b")
        self.windowed = bool(model.receive_window) and not model.unlimited

    def cover(self, limit_s: float, strict: bool) -> Placement | None:
        """A plan within the limit (``strict``: below it), or None: there is none (proved).

        Raises:
            TimeoutError: undecided at the deadline.
        """
        from ortools.sat.python import cp_model

        cp: Any = cp_model.CpModel()
        used, starts, stops = self._variables(cp, limit_s, strict)
        solver = _run(cp, self.deadline)
        if solver is None:
            return None
        placement = [
            StageAssignment(d, solver.value(starts[d]), solver.value(stops[d]))
            for d in range(self.model.devices)
            if solver.value(used[d])
        ]
        return tuple(sorted(placement, key=lambda stage: stage.start))

    def _variables(self, cp: Any, limit_s: float, strict: bool) -> tuple[list[Any], list[Any], list[Any]]:
        model = self.model
        n, layers = model.devices, model.layers
        used = [cp.new_bool_var(f"used{d}") for d in range(n)]
        starts = [cp.new_int_var(0, layers - 1, f"start{d}") for d in range(n)]
        stops = [cp.new_int_var(0, layers, f"stop{d}") for d in range(n)]
        sizes = [cp.new_int_var(0, layers, f"size{d}") for d in range(n)]
        places = self._places(cp, used, starts)
        intervals = []
        for d in range(n):
            intervals.append(
                cp.new_optional_interval_var(starts[d], sizes[d], stops[d], used[d], f"stage{d}")
            )
            cp.add(sizes[d] == 0).only_enforce_if(used[d].negated())
            cp.add(starts[d] == 0).only_enforce_if(used[d].negated())
            cp.add(sizes[d] >= 1).only_enforce_if(used[d])
            if d not in model.may_be_first:
                cp.add(starts[d] >= 1).only_enforce_if(used[d])
            if d not in model.may_be_last:
                cp.add(stops[d] <= layers - 1)
            self._limit(cp, d, (starts[d], stops[d], places[d]), limit_s, strict)
        cp.add_no_overlap(intervals)
        cp.add(sum(sizes) == layers)
        return used, starts, stops

    def _places(self, cp: Any, used: list[Any], starts: list[Any]) -> list[Any]:
        """By device, how many stages follow its own, where memory depends on that."""
        n = self.model.devices
        if not self.staged:
            return [None] * n
        places = [cp.new_int_var(0, self.model.max_stages - 1, f"place{d}") for d in range(n)]
        after: list[list[Any]] = [[] for _ in range(n)]
        for a in range(n):
            for b in range(a + 1, n):
                ab, ba = cp.new_bool_var(f"{a}<{b}"), cp.new_bool_var(f"{b}<{a}")
                cp.add(ab + ba == 1).only_enforce_if([used[a], used[b]])
                for before, later, x in ((a, b, ab), (b, a, ba)):
                    cp.add_implication(x, used[a])
                    cp.add_implication(x, used[b])
                    cp.add(starts[before] + 1 <= starts[later]).only_enforce_if(x)
                    after[before].append(x)
        for d in range(n):
            cp.add(places[d] == sum(after[d]))
        return places

    def _limit(self, cp: Any, d: int, stage: tuple[Any, Any, Any], limit_s: float, strict: bool) -> None:
        """Adds that d's stage stops no later than time and memory allow from its start, in its position."""
        model = self.model
        start, stop, place = stage
        rows = model.max_stages if place is not None else 1
        tables: dict[int, list[int]] = {}
        flat: list[int] = []
        for row in range(rows):
            k = model.least_in_flight(0, row + 1)
            if k not in tables:
                tables[k] = self._farthest(d, k, limit_s, strict)
            flat += tables[k]
        index = start if place is None else start + model.layers * place
        reached = cp.new_int_var(0, model.layers, f"reach{d}")
        if place is not None:
            at = cp.new_int_var(0, len(flat) - 1, f"at{d}")
            cp.add(at == index)
            index = at
        cp.add_element(index, flat, reached)
        cp.add(stop <= reached)
        if self.windowed:
            self._forbid(cp, d, (index, stop), flat)

    def _forbid(self, cp: Any, d: int, pair: tuple[Any, Any], flat: list[int]) -> None:
        """A receive window makes some shorter ranges too large: they are ruled out one by one."""
        model = self.model
        out = []
        for at, far in enumerate(flat):
            row, start = divmod(at, model.layers)
            k = model.least_in_flight(0, row + 1)
            out += [(at, stop) for stop in range(start + 1, far) if not model.fits(d, start, stop, k)]
        if out:
            cp.add_forbidden_assignments(list(pair), out)

    def _farthest(self, d: int, in_flight: int, limit_s: float, strict: bool) -> list[int]:
        """Per start, the largest stop that time and memory allow (0: none)."""
        model = self.model
        work = model.work_s[d]
        out = []
        for start in range(model.layers):
            far = 0
            for stop in range(start + 1, model.layers + 1):
                busy = work[stop] - work[start]
                if busy > limit_s or (strict and busy == limit_s):
                    break
                if model.fits(d, start, stop, in_flight):
                    far = stop
                elif not self.windowed:
                    break
            out.append(far)
        return out


def solve_balanced_edges(
    edges: StageEdges, lengths: Ints, sizes: list[int], deadline: float
) -> list[ClassEdge] | None:
    """One edge a device that balance, connect and hold all layers, as (class of the device, edge), or None:
    there are none (proved).

    Args:
        edges: the nodes and the edges between them.
        lengths: [class, edge] the most layers within the limit.
        sizes: how many devices each class has.

    Raises:
        TimeoutError: undecided at the deadline.
    """
    from ortools.sat.python import cp_model

    cp: Any = cp_model.CpModel()
    phases = edges.run.period
    counts: dict[ClassEdge, Any] = {}
    for row, size in enumerate(sizes):
        for e in range(len(edges.edges)):
            if lengths[row, e] > 0:
                counts[row, e] = cp.new_int_var(0, size, f"{row},{e}")
        cp.add(sum(x for (r, _), x in counts.items() if r == row) <= size)
    out: list[list[Any]] = [[] for _ in range(phases + len(edges.places))]
    into: list[list[Any]] = [[] for _ in out]
    for (_, e), x in counts.items():
        out[edges.edges[e].source].append(x)
        into[edges.edges[e].target].append(x)
    for node in range(len(out)):
        if node == edges.source:
            cp.add(sum(out[node]) == 1)
        elif node == edges.sink:
            cp.add(sum(into[node]) == 1)
        else:
            cp.add(sum(into[node]) == sum(out[node]))
            if node >= phases:
                cp.add(sum(out[node]) <= 1)
    cp.add(sum(int(lengths[k]) * x for k, x in counts.items()) >= edges.model.layers)
    cp.add(sum(edges.edges[e].least * x for (_, e), x in counts.items()) <= edges.model.layers)
    for bits in range(1, 1 << phases):  # stages among some of the phases must be entered from elsewhere
        among = [(bits >> x.source & 1, bits >> x.target & 1) for x in edges.edges]
        inside = [x for (_, e), x in counts.items() if among[e] == (1, 1)]
        entering = [x for (_, e), x in counts.items() if among[e] == (0, 1)]
        cp.add(sum(inside) <= sum(sizes) * sum(entering))
    solver = _run(cp, deadline)
    if solver is None:
        return None
    return [key for key, x in counts.items() for _ in range(solver.value(x))]


def solve_covering(
    layers: int, far: Ints, sizes: list[int], deadline: float
) -> list[tuple[int, int, int]] | None:
    """Stages (class, start, farthest stop) that cover all layers, as a path from 0 that may step back, or
    None: there are none (proved). Where no shorter stage needs more, the overlaps can be cut off.

    Args:
        far: [class, start] the largest stop that is allowed (the start itself: none).
        sizes: how many devices each class has.

    Raises:
        TimeoutError: undecided at the deadline.
    """
    from ortools.sat.python import cp_model

    cp: Any = cp_model.CpModel()
    flow: list[list[Any]] = [[] for _ in range(layers + 1)]  # in, less out
    stages: dict[tuple[int, int], Any] = {}
    for row, size in enumerate(sizes):
        own = []
        for start in range(layers):
            stop = int(far[row, start])
            if stop > start and (start == 0 or stop > far[row, start - 1]):
                x = stages[row, start] = cp.new_bool_var(f"{row},{start}")
                own.append(x)
                flow[start].append(-x)
                flow[stop].append(x)
        cp.add(sum(own) <= size)
    for node in range(1, layers + 1):
        back = cp.new_bool_var(f"back{node}")
        flow[node].append(-back)
        flow[node - 1].append(back)
    for node, terms in enumerate(flow):
        cp.add(sum(terms) == (-1 if node == 0 else 1 if node == layers else 0))
    solver = _run(cp, deadline)
    if solver is None:
        return None
    return [(row, start, int(far[row, start])) for (row, start), x in stages.items() if solver.value(x)]


def _run(cp: Any, deadline: float) -> Any:
    """The solver with its solution, or None where there is none; TimeoutError when undecided."""
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    left = deadline - time.perf_counter()
    if left <= 0:
        raise TimeoutError
    solver.parameters.max_time_in_seconds = left
    status = solver.solve(cp)
    if status == cp_model.INFEASIBLE:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise TimeoutError
    return solver


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
    """The prices of layers, 1 in all, for which classes of devices take least together, as cuts tell it.

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
        """Of ``cut``, (class, range, times): the class takes at least that range's prices, so many times."""
        row, number, count = cut
        at = self._lp.Constraint(0.0, self._lp.infinity())
        at.SetCoefficient(self._most[row], 1.0)
        at.SetCoefficient(self._prefix[int(self._stops[number])], -count)
        at.SetCoefficient(self._prefix[int(self._starts[number])], count)

    def solve(self, deadline: float) -> tuple[float, Floats] | None:
        """(what all take, the prices); None: out of time."""
        if not _solved(self._lp, deadline):
            return None
        return self._lp.Objective().Value(), np.diff([x.solution_value() for x in self._prefix])


def fractional_prices(reach: ReachTable, deadline: float) -> Floats | None:
    """Prices of layers from the linear program that cuts layers anywhere: the least T with every device's
    time within T and its memory kept. Layers that are alike are one. None: out of time."""
    from ortools.linear_solver import pywraplp

    lp: Any = pywraplp.Solver.CreateSolver("GLOP")
    times = np.diff(reach.work, axis=1)
    sums = np.array(reach.model.state_bytes) + reach.in_flight * np.array(reach.model.activation_bytes)
    needs = np.diff(sums)
    scale = float(times.sum(axis=1).mean()) / sum(reach.sizes.tolist()) or 1.0
    columns, first, index = np.unique(
        np.vstack((times, needs)), axis=1, return_index=True, return_inverse=True
    )[0:3]
    count = np.bincount(index.ravel(), minlength=len(first))
    limit = lp.NumVar(0.0, lp.infinity(), "limit")
    lp.Minimize(limit)
    covered = [lp.Constraint(1.0, lp.infinity()) for _ in range(len(first))]
    for row, size in enumerate(reach.sizes.tolist()):
        cap = float(reach.available[row])
        time_row = lp.Constraint(0.0, lp.infinity())
        time_row.SetCoefficient(limit, float(size))
        memory_row = lp.Constraint(0.0, size * 1.0) if 0 < cap < np.inf else None
        for i in range(len(first)):
            x = lp.NumVar(0.0, lp.infinity() if cap > 0 else 0.0, "")
            covered[i].SetCoefficient(x, 1.0)
            time_row.SetCoefficient(x, -float(columns[reach.timing[row], i] * count[i] / scale))
            if memory_row is not None:
                memory_row.SetCoefficient(x, float(columns[-1, i] * count[i] / cap))
    if not _solved(lp, deadline):
        return None
    prices = np.array([max(0.0, row.dual_value()) for row in covered]) / count
    out: Floats = prices[index.ravel()]
    return out


def range_prices(reach: ReachTable, far: Ints, deadline: float) -> Floats | None:
    """The prices, one a layer, 1 in all, for which all devices together can take least: of the largest ranges
    [start, far) of each class the dearest counts. None: out of time."""
    from ortools.linear_solver import pywraplp

    lp: Any = pywraplp.Solver.CreateSolver("GLOP")
    prefix = [lp.NumVar(0.0, 1.0, "") for _ in range(reach.layers + 1)]
    lp.Add(prefix[0] == 0)
    lp.Add(prefix[-1] == 1)
    for i in range(reach.layers):
        lp.Add(prefix[i + 1] - prefix[i] >= 0)
    goal = lp.Objective()
    goal.SetMinimization()
    for row, size in enumerate(reach.sizes.tolist()):
        most = lp.NumVar(0.0, 1.0, "")
        goal.SetCoefficient(most, float(size))
        for start in range(reach.layers):
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
    """Shares of columns, 1 in all, with the least load on the busiest resource; columns come one by one.

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
