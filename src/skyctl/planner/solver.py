"""CP-SAT, and the only file that imports it: is there a plan whose stages all stay within a limit?

All numbers it sees are layer indices, so there is nothing to scale and nothing to round.
"""

from __future__ import annotations

import time
from typing import Any

from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]


class Solver:
    """CP-SAT on one question: a plan whose stages all stay within a limit.

    Stages are optional intervals on the axis of layers that do not overlap and fill it. How far a device
    gets from each start is a table, made in floats by the very sums that judge a plan; for 1F1B one table
    per number of stages from there to the end.
    """

    def __init__(self, model: Model, deadline: float) -> None:
        self.model = model
        self.deadline = deadline
        self.staged = not model.unlimited and model.schedule in ("1f1b", "eager-1f1b")
        self.windowed = bool(model.window) and not model.unlimited

    def cover(self, limit_s: float, strict: bool) -> Pieces | None:
        """See ``reach.cover``; raises TimeoutError when the solver stops undecided."""
        from ortools.sat.python import cp_model

        cp: Any = cp_model.CpModel()
        used, starts, stops = self._variables(cp, limit_s, strict)
        solver: Any = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        left = self.deadline - time.perf_counter()
        if left <= 0:
            raise TimeoutError
        solver.parameters.max_time_in_seconds = left
        status = solver.solve(cp)
        if status == cp_model.INFEASIBLE:
            return None
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            raise TimeoutError
        pieces = [
            Piece(d, solver.value(starts[d]), solver.value(stops[d]))
            for d in range(self.model.devices)
            if solver.value(used[d])
        ]
        return tuple(sorted(pieces, key=lambda piece: piece.start))

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
            if d not in model.first:
                cp.add(starts[d] >= 1).only_enforce_if(used[d])
            if d not in model.last:
                cp.add(stops[d] <= layers - 1)
            self._limit(cp, d, (starts[d], stops[d], places[d]), limit_s, strict)
        cp.add_no_overlap(intervals)
        cp.add(sum(sizes) == layers)
        return used, starts, stops

    def _places(self, cp: Any, used: list[Any], starts: list[Any]) -> list[Any]:
        """Per device its number of stages to the end, less one, where memory depends on it."""
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
        """stop ≤ how far d gets from its start (in its place)."""
        model = self.model
        start, stop, place = stage
        rows = model.max_stages if place is not None else 1
        tables: dict[int, list[int]] = {}
        flat: list[int] = []
        for row in range(rows):
            k = model.flying(0, row + 1)
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
        """A received window makes some shorter ranges too large: they are ruled out one by one."""
        model = self.model
        out = []
        for at, far in enumerate(flat):
            row, start = divmod(at, model.layers)
            k = model.flying(0, row + 1)
            out += [(at, stop) for stop in range(start + 1, far) if not model.fits(d, start, stop, k)]
        if out:
            cp.add_forbidden_assignments(list(pair), out)

    def _farthest(self, d: int, flying: int, limit_s: float, strict: bool) -> list[int]:
        """Per start, the largest stop that time and memory allow (0: none)."""
        model = self.model
        work = model.work[d]
        out = []
        for start in range(model.layers):
            far = 0
            for stop in range(start + 1, model.layers + 1):
                busy = work[stop] - work[start]
                if busy > limit_s or (strict and busy == limit_s):
                    break
                if model.fits(d, start, stop, flying):
                    far = stop
                elif not self.windowed:
                    break
            out.append(far)
        return out
