"""The placement of experts as programs for OR-Tools: prices and shares with GLOP, holders with SCIP.

Tokens are split anywhere, so holders are a mixed program. CP-SAT has whole numbers only. In units that are
fine enough it found no good placement of 64 experts, and proved none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from skyctl.planner.expert_problem import (
    MOST_COPIES,
    PlacementProblem,
    PlacementWitness,
)

Holders = list[list[int]]
"""By expert, the devices that hold it."""
GAP = 1e-6
"""A time that is larger by this part is as good: no finer than what the programs compute."""


def _program(solver: str = "GLOP") -> Any:
    from ortools.linear_solver import pywraplp

    return pywraplp.Solver.CreateSolver(solver)


def _scale_s(problem: PlacementProblem) -> float:
    """About the time of a step, by which times are divided."""
    tokens = sum(expert.tokens for expert in problem.experts)
    return tokens / sum(1 / device.token_s for device in problem.devices) or 1.0


def fractional_prices(problem: PlacementProblem) -> PlacementWitness | None:
    """The prices with the largest bound, from the program that cuts experts anywhere; None: no solution."""
    lp = _program()
    scale_s = _scale_s(problem)
    most_bytes = max(1, *(device.room_bytes for device in problem.devices))
    top = lp.NumVar(0.0, lp.infinity(), "")
    lp.Minimize(top)
    covered = [lp.Constraint(1.0, lp.infinity()) for _ in problem.experts]
    time_rows, memory_rows = [], []
    for device in problem.devices:
        time_rows.append(lp.Constraint(0.0, lp.infinity()))
        time_rows[-1].SetCoefficient(top, 1.0)
        memory_rows.append(lp.Constraint(-lp.infinity(), max(0, device.room_bytes) / most_bytes))
        for row, expert in zip(covered, problem.experts, strict=True):
            if expert.memory_bytes <= device.room_bytes:
                part = lp.NumVar(0.0, lp.infinity(), "")
                row.SetCoefficient(part, 1.0)
                time_rows[-1].SetCoefficient(part, -device.token_s * expert.tokens / scale_s)
                memory_rows[-1].SetCoefficient(part, expert.memory_bytes / most_bytes)
    if lp.Solve() != lp.OPTIMAL:
        return None
    return PlacementWitness(
        tuple(max(0.0, row.dual_value()) for row in time_rows),
        tuple(max(0.0, -row.dual_value()) * scale_s / most_bytes for row in memory_rows),
    )


def balanced_shares(problem: PlacementProblem, holders: Holders) -> list[dict[str, float]]:
    """Each expert's tokens dealt to its holders so that the slowest device is fastest; none gets no share."""
    lp = _program()
    scale_s = _scale_s(problem)
    top = lp.NumVar(0.0, lp.infinity(), "")
    lp.Minimize(top)
    rows = [lp.Constraint(0.0, lp.infinity()) for _ in problem.devices]
    for row in rows:
        row.SetCoefficient(top, 1.0)
    parts: list[dict[int, Any]] = []
    for expert, held in zip(problem.experts, holders, strict=True):
        parts.append({d: lp.NumVar(0.0, 1.0, "") for d in held})
        lp.Add(sum(parts[-1].values()) == 1)
        for d, part in parts[-1].items():
            rows[d].SetCoefficient(part, -problem.devices[d].token_s * expert.tokens / scale_s)
    assert lp.Solve() == lp.OPTIMAL  # any shares are a solution
    shares = []
    for own in parts:
        dealt = {d: part.solution_value() for d, part in own.items() if part.solution_value() > 1e-9}
        whole = sum(dealt.values())
        shares.append({problem.devices[d].name: value / whole for d, value in dealt.items()})
    return shares


def search_holders(
    problem: PlacementProblem,
    least_s: float,
    hint: Holders | None,
    deadline: float,
    moved_s: Sequence[Sequence[Sequence[float]]] | None = None,
    *,
    copies: int = MOST_COPIES,
) -> tuple[Holders | None, bool]:
    """(the holders with the least time of the slowest device, None: none found; whether that is proved).

    Args:
        least_s: a lower bound on the time.
        hint: holders to begin with.
        deadline: by ``time.perf_counter``, in seconds.
        moved_s: by expert and new holder, the seconds that this takes on each device's line, per step of
            those that are left; the slowest line's are added to the time. None: holders are new.
        copies: an expert is on so many devices at most.
    """
    lp, scale_s = _program("SCIP"), _scale_s(problem)
    devices = problem.devices
    top = lp.NumVar(least_s / scale_s * (1 - GAP), lp.infinity(), "")
    moving = lp.NumVar(0.0, lp.infinity(), "")
    times: list[list[Any]] = [[] for _ in devices]
    memory: list[list[Any]] = [[] for _ in devices]
    lines: list[list[Any]] = [[] for _ in devices]
    holds: list[dict[int, Any]] = []
    for e, expert in enumerate(problem.experts):
        holds.append({})
        parts = []
        for d, device in enumerate(devices):
            if expert.memory_bytes > device.room_bytes:
                continue
            holds[e][d], part = lp.BoolVar(""), lp.NumVar(0.0, 1.0, "")
            lp.Add(part <= holds[e][d])
            parts.append(part)
            times[d].append(device.token_s * expert.tokens / scale_s * part)
            memory[d].append(expert.memory_bytes / max(1, device.room_bytes) * holds[e][d])
            for line, seconds in enumerate(moved_s[e][d]) if moved_s is not None else ():
                if seconds:
                    lines[line].append(seconds / scale_s * holds[e][d])
        lp.Add(sum(parts) == 1)
        lp.Add(sum(holds[e].values()) <= copies)
    for d in range(len(devices)):
        lp.Add(lp.Sum(times[d]) <= top)
        lp.Add(lp.Sum(memory[d]) <= 1)
        lp.Add(lp.Sum(lines[d]) <= moving)
    lp.Minimize(top + moving)
    if hint is not None:
        pairs = [(held, int(d in hint[e])) for e, own in enumerate(holds) for d, held in own.items()]
        lp.SetHint([held for held, _ in pairs], [value for _, value in pairs])
    lp.SetTimeLimit(max(100, int(1000 * (deadline - time.perf_counter()))))
    status = lp.Solve()
    if status not in (lp.OPTIMAL, lp.FEASIBLE):
        return None, bool(status == lp.INFEASIBLE)
    found = [[d for d, held in own.items() if held.solution_value() > 0.5] for own in holds]
    if not fits(problem, found):  # by less than what the solver tells apart
        return None, False
    return found, bool(status == lp.OPTIMAL)


def fits(problem: PlacementProblem, holders: Holders) -> bool:
    """Whether each device has room for what it holds."""
    need = [0] * len(problem.devices)
    for expert, own in zip(problem.experts, holders, strict=True):
        for d in own:
            need[d] += expert.memory_bytes
    return all(not n or n <= device.room_bytes for n, device in zip(need, problem.devices, strict=True))
