"""Problems of the size that people ask about, each in a process of its own: seconds, memory, gap."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from form_map import problem_of
from tables.instances import large_case, paper_case
from tables.timing import peak_rss_mb, warm_up

from planner_values.clocks import processor_clock
from planner_values.instances import sites_problem
from planner_values.outcomes import made_plan
from skyctl import Plan, Problem, SkyctlError, verify

PATIENCE_S = 1200.0
"""When a case is given up."""
LONG_S = 3600.0
"""The same, of a case that is left out unless it is asked for."""
TOKENS = 2**17


class Case(NamedTuple):
    """One problem. ``goal``: in words; ``checked``: whether ``verify`` looks at the plan."""

    make: Callable[[], Problem]
    strategy: str
    limit_s: float
    goal: str
    checked: bool = True
    long: bool = False


def _in(problem: Problem, parallel: str) -> Problem:
    return problem.model_copy(update={"parallel": parallel})


CASES: dict[str, Case] = {
    "64 × 483": Case(lambda: paper_case("f1"), "pipeline", 5.0, "proved, ≤ 0.5 s"),
    "64 × 483, caps": Case(lambda: paper_case("f1c"), "pipeline", 5.0, "proved, ≤ 0.5 s"),
    "64 × 483, factors 2–7": Case(lambda: paper_case("f2"), "pipeline", 5.0, "proved, ≤ 0.5 s"),
    "64 × 483, factors 2–7, caps": Case(lambda: paper_case("f2c"), "pipeline", 5.0, "proved, ≤ 0.5 s"),
    "1,024 × 10,002": Case(lambda: large_case(1024, 3333, 1024), "pipeline", 30.0, "≤ 4 s"),
    "11 × 24, two sites, hybrid": Case(
        lambda: _in(sites_problem(0, 11, 24, 2, 16), "hybrid"), "hybrid", 60.0, "gap ≤ 3%"
    ),
    "64 × 163, four sites": Case(lambda: sites_problem(0, 64, 163, 4, 64), "pipeline", 30.0, "gap ≤ 18.5%"),
    "100 devices, ten sites, 128k tokens, hybrid": Case(
        lambda: _in(problem_of(10, 100, TOKENS), "hybrid"), "hybrid", 30.0, "gap ≤ 60%", checked=False
    ),
    "100 devices, ten sites, 128k tokens, auto": Case(
        lambda: problem_of(10, 100, TOKENS), "auto", 30.0, "gap ≤ 60%", checked=False
    ),
    "1,000 devices, ten sites, 128k tokens, auto": Case(
        lambda: problem_of(10, 1000, TOKENS), "auto", 30.0, "≤ 40 s, ≤ 3 GiB", checked=False, long=True
    ),
}


def measured_apart(name: str) -> dict[str, Any]:
    """One case, in a process of its own; ``status`` says so where it brings no answer."""
    entry = Path(__file__).resolve().parents[1] / "planner_record.py"
    patience_s = LONG_S if CASES[name].long else PATIENCE_S
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(entry), "--case", name],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=patience_s,
        )
    except subprocess.TimeoutExpired:
        return {"status": "no answer", "wall_s": patience_s}
    if done.returncode:
        return {"status": f"ended with {done.returncode}", "wall_s": time.monotonic() - began}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measured(name: str) -> dict[str, Any]:
    """One case here: its problem ready beforehand, and what is imported on first use imported."""
    case = CASES[name]
    warm_up()
    problem = case.make()
    held_mb = peak_rss_mb()
    began, spent = time.monotonic(), time.process_time()
    try:
        with processor_clock():
            made = made_plan(problem, case.strategy, case.limit_s)
    except SkyctlError as exc:
        return {"status": f"exit {exc.exit_code}", **_spent(began, spent, held_mb)}
    row = {**_result(made), **_spent(began, spent, held_mb)}
    if case.checked:
        began = time.process_time()
        verdict = verify(made.problem, made)
        bound = next((one for one in verdict.checks if one.name == "bound"), None)
        row["verify_s"] = round(time.process_time() - began, 2)
        row["verified"] = verdict.ok and bound is not None and bound.checked
    return row


def _spent(began: float, spent: float, held_mb: float) -> dict[str, float]:
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - spent
    peaks = {"peak_mb": round(peak_rss_mb()), "problem_mb": round(held_mb)}
    return {"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3), **peaks}


def _result(made: Plan) -> dict[str, Any]:
    proof = made.certificate
    found: dict[str, Any] = {
        "status": proof.status,
        "value_s": proof.value_s,
        "bound_s": proof.lower_bound_s,
        "gap": proof.gap,
        "parallel": made.problem.parallel,
        "pipelines": len(made.pipelines),
        "stages": len(made.placed_stages),
    }
    if made.forms:
        found["forms"] = {one.parallel: [one.iteration_s, one.lower_bound_s] for one in made.forms}
        bounds = [one.lower_bound_s for one in made.forms]
        known = [bound for bound in bounds if bound is not None]
        if len(known) == len(bounds) and min(known) > 0:  # no form has a plan below the least of them
            found["gap"] = proof.value_s / min(known) - 1
    return found
