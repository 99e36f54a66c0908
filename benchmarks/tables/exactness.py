"""Is ``optimal`` the optimum? Against brute force over every order, subset and cut of small problems."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

from surviving.lab import of_tests

from skyctl import InfeasibleError, SkyctlError, plan
from tables.page import Table, markdown, seconds

TOLERANCE = 1e-9
# The generator and the brute force are the tests' own: fifty of these problems are played in CI.


def exactness(count: int, limit_s: float) -> Iterator[Table]:
    """``count`` problems of the random suite, each by brute force and by ``plan``."""
    problems, brute = of_tests("planner.planner_problems"), of_tests("planner.exhaustive")
    rows: Counter[tuple[str, str]] = Counter()
    states: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    worst = brute_s = 0.0
    walls: list[float] = []
    for i in range(count):
        problem = problems.suite_problem(i)
        began = time.perf_counter()
        best = brute.exhaustive(problem)
        middle = time.perf_counter()
        state, value = _planned(problem, limit_s)
        brute_s += middle - began
        walls.append(time.perf_counter() - middle)
        rows[problem.objective, problem.schedule] += 1
        states[state] += 1
        if best is None or value is None:
            equal = best is None and state == "infeasible"
        else:
            difference = abs(value / best - 1) if best > 0 else abs(value)
            worst = max(worst, difference)
            equal = difference <= TOLERANCE and state == "optimal"
        if not equal:
            wrong.append({"i": i, "brute_force_s": best, "planned_s": value, "status": state})
    seeds = f"{problems.SUITE_SEED}–{problems.SUITE_SEED + count - 1}"
    record = {
        "table": "exactness",
        "instances": count,
        "seeds": seeds,
        "equal": count - len(wrong),
        "wrong": wrong[:10],
        "worst_relative_difference": worst,
        "statuses": dict(states),
        "by_kind": {f"{objective}, {schedule}": n for (objective, schedule), n in sorted(rows.items())},
        "plan_s": {"median": median(walls), "worst": max(walls), "total": sum(walls)},
        "brute_force_s": brute_s,
    }
    yield Table(record, _text(record))


def _text(record: dict[str, Any]) -> str:
    states, walls = record["statuses"], record["plan_s"]
    head = ["instances", "equal to brute force", "worst difference", "proved optimal", "proved infeasible"]
    head += ["median", "worst", "brute force in all"]
    row = [
        str(record["instances"]),
        str(record["equal"]),
        f"{record['worst_relative_difference']:.1e}",
        str(states.get("optimal", 0)),
        str(states.get("infeasible", 0)),
        seconds(walls["median"]),
        seconds(walls["worst"]),
        seconds(record["brute_force_s"]),
    ]
    kinds = "; ".join(f"{kind}: {count}" for kind, count in record["by_kind"].items())
    return markdown(head, [row]) + f"\n\nSeeds {record['seeds']}. {kinds}."


def _planned(problem: Any, limit_s: float) -> tuple[str, float | None]:
    try:
        proof = plan(problem, time_limit_s=limit_s).certificate
    except InfeasibleError:
        return "infeasible", None
    except SkyctlError as exc:
        return f"error: {exc}", None
    return proof.status, proof.value_s
