"""How long: the paper's case, large ones, sites, heuristic and simulator; and ``verify`` on each plan."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from skyctl import SkyctlError, Verdict, plan, verify
from skyctl.records.problem import Problem
from skyctl.schedule.actions import least_in_flight
from skyctl.schedule.simulation import simulate
from skyctl.schedule.step_times import FREE_MESSAGE, BoundaryTimes, StageTimes
from tables.instances import (
    crossings,
    devices,
    large_case,
    paper_case,
    random_costs_case,
    sites_case,
)
from tables.page import Table, markdown, percent, seconds

PATIENCE_S = 180.0
"""When a case in a process of its own is given up: its limit plus what planning and verifying may overrun."""


class Case(NamedTuple):
    """One planning problem. ``alone``: in a process of its own, whose memory is measured."""

    name: str
    make: Callable[[], Problem]
    limit_s: float
    goal: str
    alone: bool = False
    objective: str = "bottleneck"


def _paper(name: str, words: str) -> Case:
    return Case(f"64 × 483, {words}", lambda: paper_case(name), 5.0, "proved, ≤ 1 s")


CASES: dict[str, Case] = {
    "f1": _paper("f1", "factors [1, 2)"),
    "f1c": _paper("f1c", "the same, caps"),
    "f2": _paper("f2", "factors 2–7"),
    "f2c": _paper("f2c", "the same, caps"),
    "256": Case(
        "256 × 1,203, factors [1, 4)", lambda: large_case(256, 400, 256), 5.0, "≤ 0.05% in 5 s", True
    ),
    "1024": Case(
        "1,024 × 10,002, factors [1, 4)",
        lambda: large_case(1024, 3333, 1024),
        30.0,
        "≤ 0.1% in 30 s, ≤ 2 GB",
        True,
    ),
    "random": Case("64 × 483, costs [1, 9)", lambda: random_costs_case(483), 30.0, "≤ 0.5% in 30 s"),
    "sites": Case(
        "24 × 123, 3 sites, mean stage 1 s",
        lambda: sites_case(0, 1.0),
        30.0,
        "≤ 5% in 30 s",
        objective="iteration",
    ),
    "sites-short": Case(
        "24 × 123, 3 sites, mean stage 0.1 s",
        lambda: sites_case(0, 0.1),
        30.0,
        "≤ 5% in 30 s",
        objective="iteration",
    ),
}


def timing(names: list[str] | None = None) -> Iterator[Table]:
    """All cases, or those named; then the heuristic and the simulator."""
    warm_up()
    rows = []
    for name in names or CASES:
        rows.append(_alone(name) if CASES[name].alone else measured(name))
    yield Table({"table": "time", "rows": rows}, _text(rows))
    if not names:
        yield quick_parts()


def warm_up() -> None:
    """Imports what ``plan`` and ``verify`` import when first used, so that no case pays for it."""
    problem = paper_case("f1")
    small = problem.model_copy(update={"devices": problem.devices[:3], "layers": problem.layers[:9]})
    verify(small, plan(small, time_limit_s=5.0))
    from ortools.sat.python import cp_model  # noqa: F401


def measured(name: str) -> dict[str, Any]:
    """One case: planned and verified in this process, its problem ready beforehand."""
    case = CASES[name]
    problem = case.make()
    row = _described(name)
    began = time.perf_counter()
    try:
        found = plan(problem, time_limit_s=case.limit_s)
    except SkyctlError as exc:
        return {**row, "status": f"error: {exc}", "plan_s": time.perf_counter() - began}
    row["plan_s"] = time.perf_counter() - began
    proof = found.certificate
    used = [stage.replicas[0].device for stage in found.stages]
    row |= {
        "status": proof.status,
        "value_s": proof.value_s,
        "bound_s": proof.lower_bound_s,
        "gap": proof.gap,
        "method": proof.method,
        "stages": len(used),
        "crossings": crossings(used) if problem.links else None,
        "plan_peak_rss_mb": peak_rss_mb() if case.alone else None,
    }
    began = time.perf_counter()
    verdict = verify(problem, found)
    row |= {"verify_s": time.perf_counter() - began, "verified": _word(verdict)}
    row["peak_rss_mb"] = peak_rss_mb() if case.alone else None
    return row


def _word(verdict: Verdict) -> str:
    if not verdict.ok:
        return "fails: " + ", ".join(check.name for check in verdict.checks if not check.ok)
    left = [check.name for check in verdict.checks if not check.checked]
    return "not checked: " + ", ".join(left) if left else "holds"


def _alone(name: str) -> dict[str, Any]:
    """The same in a process of its own."""
    entry = Path(__file__).resolve().parents[1] / "planner.py"
    command = [sys.executable, str(entry), "--case", name]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return {**_described(name), "status": "no answer", "plan_s": PATIENCE_S}
    if done.returncode:
        raise SystemExit(f"case {name} ended with {done.returncode}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _described(name: str) -> dict[str, Any]:
    case = CASES[name]
    return {
        "case": name,
        "name": case.name,
        "objective": case.objective,
        "limit_s": case.limit_s,
        "goal": case.goal,
    }


def peak_rss_mb() -> float:
    """The most memory this process has held, in 10⁶ bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would count the parent's memory at the time of its fork
        kib = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kib) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def quick_parts() -> Table:
    """The heuristic at 64 × 483 by both objectives, and the simulator at 64 stages × 64 microbatches."""
    figures: dict[str, float] = {}
    bound = plan(paper_case("f1"), time_limit_s=5.0).certificate.lower_bound_s
    ratio = 0.0
    for objective in ("bottleneck", "iteration"):
        problem = paper_case("f1").model_copy(update={"objective": objective})
        walls = []
        for _ in range(3):
            began = time.perf_counter()
            found = plan(problem, "heuristic")
            walls.append(time.perf_counter() - began)
        figures[f"heuristic_{objective}_s"] = median(walls)
        if objective == "bottleneck" and bound:
            ratio = found.certificate.value_s / bound
    first, again = _simulator_s()
    figures |= {"simulator_first_s": first, "simulator_s": again}
    rows = [
        ["heuristic, 64 × 483, `bottleneck`", seconds(figures["heuristic_bottleneck_s"]), "≤ 50 ms"],
        ["heuristic, 64 × 483, `iteration`", seconds(figures["heuristic_iteration_s"]), "≤ 1 s"],
        ["simulator, 64 × 64, 1F1B, first play of a shape", seconds(first), "≤ 20 ms"],
        ["simulator, 64 × 64, 1F1B, later ones", seconds(again), "≤ 20 ms"],
    ]
    text = markdown(["what", "time", "goal"], rows)
    text += f"\n\nMedians of three; the heuristic's bottleneck is {ratio:.4f} × the optimum or bound there."
    return Table({"table": "parts", "heuristic_ratio": ratio, **figures}, text)


def _simulator_s() -> tuple[float, float]:
    count = microbatches = 64
    factors = [device.flops_per_s for device in devices([1 + i / count for i in range(count)])]
    stages = [StageTimes(1e12 / speed, 2e12 / speed) for speed in factors]
    flying = [least_in_flight("1f1b", s, count, microbatches) for s in range(count)]
    walls = []
    for _ in range(4):
        began = time.perf_counter()
        simulate(
            "1f1b", microbatches, flying, stages, [BoundaryTimes(FREE_MESSAGE, FREE_MESSAGE)] * (count - 1)
        )
        walls.append(time.perf_counter() - began)
    return walls[0], median(walls[1:])


def _text(rows: list[dict[str, Any]]) -> str:
    head = [
        "devices × layers",
        "objective",
        "status",
        "gap",
        "plan",
        "goal",
        "verify",
        "bound verified",
        "notes",
    ]
    body = []
    for row in rows:
        notes = []
        if row.get("peak_rss_mb"):
            notes.append(
                f"peak {row['plan_peak_rss_mb'] / 1e3:.2f} GB ({row['peak_rss_mb'] / 1e3:.2f} with verify)"
            )
        if row.get("crossings") is not None:
            notes.append(f"{row['crossings']} crossings, {row['stages']} stages")
        body.append(
            [
                row["name"],
                f"`{row['objective']}`",
                row["status"],
                percent(row.get("gap")),
                seconds(row["plan_s"]),
                row["goal"],
                seconds(row["verify_s"]) if "verify_s" in row else "—",
                row.get("verified", "—"),
                "; ".join(notes),
            ]
        )
    seeds = "Seeds: factors 32 and 35, caps 22; 256, 1024, 483; sites 0."
    return f"{markdown(head, body)}\n\n{seeds}"
