"""The planner's values, from the five names of skyctl's Python interface and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.behaviour import instances

from skyctl import Plan, Problem, plan, predict, verify

LIMIT_S = 120.0
"""For what is proved in a second or two: never the limit decides, however busy the machine."""
BOUNDED_S = 5.0
SCHEDULES = ("1f1b", "eager-1f1b", "zero-bubble", "gpipe", "sequential")
STRATEGIES = ("even", "heuristic", "optimal")

Case = Callable[[], dict[str, Any]]


def cases() -> Iterator[tuple[str, Case]]:
    """Name and what makes the recording, instance by instance."""
    for i in range(500):
        yield f"suite {i:03d}", lambda i=i: planned(instances.suite_problem(i))
    for name, problem in instances.table_instances():
        yield f"table {name}", lambda p=problem: planned(p)
    for objective in ("iteration", "bottleneck"):
        for schedule in SCHEDULES:
            more = {"objective": objective, "schedule": schedule}
            yield f"small {objective} {schedule}", lambda m=more: planned(instances.small(**m))
            yield f"handled {objective} {schedule}", lambda m=more: planned({**instances.handled(), **m})


def bounded_cases() -> Iterator[tuple[str, Case]]:
    for name, problem in instances.bounded_instances():
        yield name, lambda p=problem: bounded(p)


def planned(document: dict[str, Any]) -> dict[str, Any]:
    """Every strategy's value; of those that decide alone (no ties) their stages, too."""
    problem = Problem.model_validate(document)
    return {strategy: one(problem, strategy) for strategy in STRATEGIES}


def one(problem: Problem, strategy: str) -> dict[str, Any]:
    made = attempt(problem, strategy, LIMIT_S)
    if isinstance(made, dict):
        return made
    proof = made.certificate
    checked = verify(problem, made)
    if strategy == "optimal" and proof.status != "optimal":  # how near it came is a matter of time
        return {"status": proof.status, "verified": checked.ok}
    found: dict[str, Any] = {
        "status": proof.status,
        "value_s": proof.value_s,
        "lower_bound_s": proof.lower_bound_s,
        "gap": proof.gap,
        "verified": checked.ok,
    }
    if strategy == "optimal":
        return found
    again = predict(problem, made)
    found["stages"] = " ".join(f"{x.start}-{x.stop}@{x.replicas[0].device}" for x in made.stages)
    found["iteration_s"] = again.iteration_s
    found["bottleneck_s"] = again.bottleneck_s
    found["in_flight"] = sum(x.replicas[0].in_flight for x in made.stages)
    found["memory_bytes"] = sum(x.memory_bytes for x in again.replicas)
    if len(made.stages) > 12:  # several plans have the same slowest stage, and processors round differently
        found["stages"] = f"{len(made.stages)} of them"
        del found["iteration_s"]
    return found


def attempt(problem: Problem, strategy: str, limit_s: float) -> Plan | dict[str, Any]:
    """The plan; else the exit code that the error has."""
    try:
        return plan(problem, strategy=strategy, time_limit_s=limit_s)
    except Exception as exc:
        if not hasattr(exc, "exit_code"):
            raise
        return {"exit": exc.exit_code}


def bounded(document: dict[str, Any]) -> dict[str, Any]:
    """The figures that time decides: a value and a bound that no other run may contradict."""
    problem = Problem.model_validate(document)
    made = plan(problem, time_limit_s=BOUNDED_S)
    proof = made.certificate
    return {
        "value_s": proof.value_s,
        "lower_bound_s": proof.lower_bound_s,
        "verified": verify(problem, made).ok,
    }


def contradictions(recorded: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """A bound above a value that was reached, then or now; a value that became much worse."""
    lines = []
    for name, (low, high) in {
        "bound now, value then": (present["lower_bound_s"], recorded["value_s"]),
        "bound then, value now": (recorded["lower_bound_s"], present["value_s"]),
        "value now, value then and a tenth": (present["value_s"], recorded["value_s"] * 1.1),
    }.items():
        if (low or 0.0) > high * (1 + 1e-9):
            lines.append(f"{name}: {low} > {high}; recorded {recorded}, now {present}")
    if not present["verified"]:
        lines.append("verified: recorded true, now false")
    return lines
