"""Searches with CP-SAT (OR-Tools) for plans whose stages all stay within a limit.

All numbers that it sees are layer indices, so there is nothing to scale and nothing to round.
"""

from __future__ import annotations

import time
from typing import Any

from skyctl.planner.bottleneck.reach_table import Ints
from skyctl.planner.bottleneck.repeated_layers import StageEdges
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment

ClassEdge = tuple[int, int]
"""(class of devices, edge)."""


class IntervalSolver:
    """CP-SAT on one question: is there a plan whose stages all stay within a limit?

    Stages are optional intervals on the axis of layers that do not overlap and fill it. How far a device
    gets from each start is a table, made in floats by the very sums that judge a plan; for 1F1B one table
    per number of stages from there to the end.

    Args:
        deadline: by ``time.perf_counter``, in seconds.
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
        deadline: by ``time.perf_counter``, in seconds.

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
    None: there are none (proved). If no shorter stage needs more, the overlaps can be cut off.

    Args:
        far: [class, start] the largest stop that is allowed (the start itself: none).
        sizes: how many devices each class has.
        deadline: by ``time.perf_counter``, in seconds.

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
