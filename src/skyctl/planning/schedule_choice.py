"""Which schedule, and how many microbatches: quick plans decide, then the strategy has the rest of the time.

The simplest schedule within ``NEAR_BEST`` of the best is taken: 1F1B where its own depths are enough, eager
1F1B where slow links need more in flight, zero-bubble where weight gradients fill what still idles.
Sequential is for what fits no other way.
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

NEAR_BEST = 0.01
SIMPLEST_FIRST: tuple[Schedule, ...] = ("1f1b", "eager-1f1b", "zero-bubble", "sequential")
"""All schedules to choose from, the simplest first; the last one only where nothing else fits."""
CHOICE_SHARE = 0.3
"""Share of the time limit for choosing."""
CLOSER = 2
"""How many numbers of microbatches are looked at under every schedule."""

PlanSearch = Callable[[Problem, float], Plan]
"""(problem, time limit in seconds) → a plan; raises InfeasibleError or UndecidedError."""


class ScheduleChooser:
    """Quick plans of problems that differ in schedule and number of microbatches."""

    def __init__(self, quickly: PlanSearch, limit_s: float) -> None:
        self.quickly = quickly
        self.deadline = time.perf_counter() + CHOICE_SHARE * limit_s
        self.plans: list[Plan] = []
        self.failures: list[InfeasibleError | UndecidedError] = []

    def try_all(self, problems: Sequence[Problem]) -> list[Plan]:
        """The plans found, one problem after the other while there is time (the first is always tried)."""
        plans = []
        for problem in problems:
            if self.plans and time.perf_counter() > self.deadline:
                break
            try:
                left_s = max(0.0, self.deadline - time.perf_counter())
                plans.append(self.quickly(problem, left_s))
            except (InfeasibleError, UndecidedError) as exc:
                self.failures.append(exc)
        self.plans += plans
        return plans

    def choose(self, problems: Sequence[Problem]) -> Plan | None:
        """The quick plan whose schedule to take; None: nothing fits under any."""
        deep = sorted(
            self.try_all([with_schedule(p, "eager-1f1b") for p in problems]), key=lambda plan: plan.step_s
        )
        for plan in deep[:CLOSER]:
            others = [with_schedule(plan.problem, "1f1b")]
            if _knows_weight_gradients(plan.problem):
                others.append(with_schedule(plan.problem, "zero-bubble"))
            self.try_all(others)
        if not self.plans:
            self.failures = []  # nothing needs less memory: what is proved for sequential holds for all
            self.try_all([with_schedule(p, "sequential") for p in problems])
        return simplest_near_best(self.plans)


def simplest_near_best(plans: Sequence[Plan]) -> Plan | None:
    """The fastest plan with the simplest schedule that comes within ``NEAR_BEST`` of the fastest of all."""
    if not plans:
        return None
    limit = min(plan.step_s for plan in plans) * (1 + NEAR_BEST)
    near = [plan for plan in plans if plan.step_s <= limit]
    return min(near, key=lambda plan: (SIMPLEST_FIRST.index(plan.problem.schedule), plan.step_s))


def promising_first(problems: Sequence[Problem], plans: Sequence[Plan]) -> list[Problem]:
    """The problems by their quick plans' steps, so that most of a limited time goes to the best of them."""
    quick_s = {(plan.problem.schedule, plan.problem.microbatches): plan.step_s for plan in plans}
    return sorted(problems, key=lambda p: quick_s.get((p.schedule, p.microbatches), math.inf))


def with_schedule(problem: Problem, schedule: Schedule) -> Problem:
    """The problem with another schedule."""
    return problem.model_copy(update={"schedule": schedule})


def _knows_weight_gradients(problem: Problem) -> bool:
    """Whether it is known how much of a backward is weight gradients, on every device."""
    times = [problem.times.get(device.id) for device in problem.devices]
    return problem.objective == "iteration" and all(t is not None and t.weight_s is not None for t in times)
