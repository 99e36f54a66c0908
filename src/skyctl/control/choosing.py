"""Which schedule, and how many microbatches: what is quickly planned decides, the strategy then has the time.

The simplest schedule within ``NEARLY`` of the best is taken: 1F1B where its own depths are enough, eager 1F1B
where slow links want more in flight, zero-bubble where weight gradients fill what still idles. Sequential is
for what fits no other way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem, Schedule

AUTO: Literal["auto"] = "auto"
ScheduleChoice = Schedule | Literal["auto"]

NEARLY = 0.01
SIMPLE: tuple[Schedule, ...] = ("1f1b", "eager-1f1b", "zero-bubble", "sequential")
"""The simplest first; the last one only where nothing else fits."""
QUICKLY = 0.3
"""Share of the time limit for choosing."""
CLOSER = 2
"""So many numbers of microbatches are looked at under every schedule."""

PlanOne = Callable[[Problem, float], Plan]
"""A plan for a problem within seconds; raises InfeasibleError or UndecidedError."""


class Chooser:
    """Quick plans of problems that differ in schedule and number of microbatches."""

    def __init__(self, quickly: PlanOne, limit_s: float) -> None:
        self.quickly = quickly
        self.deadline = time.perf_counter() + QUICKLY * limit_s
        self.made: list[Plan] = []
        self.failures: list[InfeasibleError | UndecidedError] = []

    def try_all(self, problems: Sequence[Problem]) -> list[Plan]:
        """Plans that were found, one after the other while there is time (the first one always is tried)."""
        found = []
        for problem in problems:
            if self.made and time.perf_counter() > self.deadline:
                break
            try:
                left_s = max(0.0, self.deadline - time.perf_counter())
                found.append(self.quickly(problem, left_s))
            except (InfeasibleError, UndecidedError) as exc:
                self.failures.append(exc)
        self.made += found
        return found

    def choose(self, problems: Sequence[Problem]) -> Plan | None:
        """The quick plan to go by, with any of the schedules; None: nothing fits."""
        deep = sorted(self.try_all([with_schedule(p, "eager-1f1b") for p in problems]), key=value_s)
        for plan in deep[:CLOSER]:
            others = [with_schedule(plan.problem, "1f1b")]
            if _split(plan.problem):
                others.append(with_schedule(plan.problem, "zero-bubble"))
            self.try_all(others)
        if not self.made:
            self.failures = []  # nothing needs less memory: what is proved for sequential holds for all
            self.try_all([with_schedule(p, "sequential") for p in problems])
        return preferred(self.made)


def preferred(plans: Sequence[Plan]) -> Plan | None:
    """The fastest with the simplest schedule that comes within ``NEARLY`` of the fastest of all."""
    if not plans:
        return None
    limit = min(map(value_s, plans)) * (1 + NEARLY)
    near = [plan for plan in plans if value_s(plan) <= limit]
    return min(near, key=lambda plan: (SIMPLE.index(plan.problem.schedule), value_s(plan)))


def promising_first(problems: Sequence[Problem], plans: Sequence[Plan]) -> list[Problem]:
    """By the quick plans' steps: where the search is limited in time, most of it goes to the best of them."""
    known = {(plan.problem.schedule, plan.problem.microbatches): value_s(plan) for plan in plans}
    return sorted(problems, key=lambda p: known.get((p.schedule, p.microbatches), math.inf))


def value_s(plan: Plan) -> float:
    """Seconds a step, whatever the objective: the same number of samples for any number of microbatches."""
    return plan.predicted.iteration_s


def with_schedule(problem: Problem, schedule: Schedule) -> Problem:
    """The problem with another schedule."""
    return problem.model_copy(update={"schedule": schedule})


def _split(problem: Problem) -> bool:
    """Whether it is known how much of a backward is weight gradients, on every device."""
    times = [problem.times.get(device.id) for device in problem.devices]
    return problem.objective == "iteration" and all(t is not None and t.weight_s is not None for t in times)
