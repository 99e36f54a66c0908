"""Sky Computing's "optimal" allocation, as published (``optimal_allocate``), under CBC and under CP-SAT.

A binary x[device, layer]; per device its last and first layer y, z, held to x by big-M rows, and
y − z ≤ Σ x − 1, which makes the layers contiguous; every layer once; memory; minimise q ≥ time · Σ x · flops.
Solved to a relative gap of 0.2, as published. Differences: OR-Tools' interface to CBC takes no warm start
(the published one starts from the even split), and CP-SAT needs whole numbers: the ideal stage's time is
scaled to 2^20 and rounded, bytes by a power of two (whole bytes stay exact), rounded to the safe side.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from baselines.common import Assignment, costs, free_bytes, layer_bytes, whole_s
from skyctl.records.problem import Problem

GAP = 0.2
SOLVERS = ("CBC", "CP-SAT")


@dataclass(frozen=True)
class Milp:
    """The result of a solver: its word for it, the assignment if any, its own bound in seconds, wall time."""

    status: str
    assignment: Assignment | None
    bound_s: float | None
    wall_s: float


def published_milp(problem: Problem, solver: str, limit_s: float, gap: float = GAP) -> Milp:
    """Solves the published model with ``CBC`` or ``CP-SAT``, one thread."""
    began = time.perf_counter()
    status, found, bound = (_cbc if solver == "CBC" else _cp_sat)(problem, limit_s, gap)
    return Milp(status, found, bound, time.perf_counter() - began)


def _rates(problem: Problem) -> list[float]:
    """Seconds a unit of cost, per device."""
    total = math.fsum(costs(problem))
    return [whole_s(problem, device.id) / total for device in problem.devices]


def _contiguous(add: Any, x: list[list[Any]], y: list[Any], z: list[Any], total: Any) -> None:
    """The published rows 2 to 5."""
    layers = len(x[0])
    for row, last, first in zip(x, y, z, strict=True):
        for j, var in enumerate(row):
            add(last >= j * var)
            add(first <= j * var + (layers + 1) * (1 - var))
        add(last - first <= total(row) - 1)
    for j in range(layers):
        add(total([row[j] for row in x]) == 1)


def _read(problem: Problem, owners: list[list[bool]]) -> Assignment:
    """The devices' ranges in order of the layers."""
    ranges = [
        (row.index(True), row.index(True) + sum(row), device.id)
        for row, device in zip(owners, problem.devices, strict=True)
        if any(row)
    ]
    return [(device, start, stop) for start, stop, device in sorted(ranges)]


def _cbc(problem: Problem, limit_s: float, gap: float) -> tuple[str, Assignment | None, float | None]:
    from ortools.linear_solver import pywraplp

    solver: Any = pywraplp.Solver.CreateSolver("CBC")
    devices, layers = len(problem.devices), len(problem.layers)
    work, need = costs(problem), layer_bytes(problem)
    unit = math.fsum(work)
    rates = [rate * unit for rate in _rates(problem)]
    x = [[solver.BoolVar("") for _ in range(layers)] for _ in range(devices)]
    y = [solver.NumVar(0, layers, "") for _ in range(devices)]
    z = [solver.NumVar(0, layers, "") for _ in range(devices)]
    q = solver.NumVar(0, solver.infinity(), "")
    largest = max(need) or 1.0
    for row, room in zip(x, free_bytes(problem), strict=True):
        if room < math.inf:
            solver.Add(
                solver.Sum(v * (b / largest) for v, b in zip(row, need, strict=True)) <= room / largest
            )
    _contiguous(solver.Add, x, y, z, solver.Sum)
    for row, rate in zip(x, rates, strict=True):
        solver.Add(q >= solver.Sum(v * (rate * w / unit) for v, w in zip(row, work, strict=True)))
    solver.Minimize(q)
    solver.SetTimeLimit(int(limit_s * 1000))
    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, gap)
    code = solver.Solve(parameters)
    words = {pywraplp.Solver.OPTIMAL: "within its gap", pywraplp.Solver.FEASIBLE: "stopped by the limit"}
    if code not in words:
        return "infeasible" if code == pywraplp.Solver.INFEASIBLE else "nothing found", None, None
    owners = [[v.solution_value() > 0.5 for v in row] for row in x]
    return words[code], _read(problem, owners), float(solver.Objective().BestBound())


def _cp_sat(problem: Problem, limit_s: float, gap: float) -> tuple[str, Assignment | None, float | None]:
    from ortools.sat.python import cp_model

    cp: Any = cp_model.CpModel()
    devices, layers = len(problem.devices), len(problem.layers)
    work, need, rates = costs(problem), layer_bytes(problem), _rates(problem)
    ideal = math.fsum(work) / math.fsum(1 / rate for rate in rates)
    second = 2**20 / ideal
    byte = 2.0 ** math.floor(50 - math.log2(math.fsum(need) or 1.0))
    x = [[cp.new_bool_var("") for _ in range(layers)] for _ in range(devices)]
    y = [cp.new_int_var(0, layers, "") for _ in range(devices)]
    z = [cp.new_int_var(0, layers, "") for _ in range(devices)]
    for row, room in zip(x, free_bytes(problem), strict=True):
        if room < math.inf:
            cp.add(
                sum(v * math.ceil(b * byte) for v, b in zip(row, need, strict=True))
                <= math.floor(room * byte)
            )
    _contiguous(cp.add, x, y, z, sum)
    loads = [[round(rate * w * second) for w in work] for rate in rates]
    q = cp.new_int_var(0, max(sum(row) for row in loads), "q")
    for row, load in zip(x, loads, strict=True):
        cp.add(q >= sum(v * size for v, size in zip(row, load, strict=True)))
    cp.minimize(q)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.relative_gap_limit = gap
    code = solver.solve(cp)
    words = {cp_model.OPTIMAL: "within its gap", cp_model.FEASIBLE: "stopped by the limit"}
    if code not in words:
        return "infeasible" if code == cp_model.INFEASIBLE else "nothing found", None, None
    owners = [[bool(solver.value(v)) for v in row] for row in x]
    return words[code], _read(problem, owners), solver.best_objective_bound / second
