"""Changes that speed training up, but change what is trained: never done unasked, said with their figures.

Every change is a claim of existence, from a quick plan of the changed problem: more may be gained.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from skyctl.errors import InfeasibleError, InvalidRecordError, UndecidedError
from skyctl.planner.api import plan as plan_problem
from skyctl.planning.compressed_sums import with_matrices
from skyctl.planning.parallelism_choice import PIPELINE, with_parallelism
from skyctl.records.plan import Plan
from skyctl.records.problem import Parallel, Problem
from skyctl.records.profile import Profile
from skyctl.records.rhythm import AUTO_STEPS, Rhythm
from skyctl.records.sync_format import ROUNDED_FORMATS

COMPRESSED = "powersgd:4"
"""The format that is looked at where shapes of gradients are known."""
WORTH = 1.05
"""Changes that gain less, as a factor of samples a second, are not worth a line."""
SAME = 1e-9
"""Gains that differ by less, relative, are equal: the parallelism that comes first is named."""
MOST_S = 3.0
"""Seconds in which most of what can be found is."""
LARGER = 2
"""How many times as large a batch is looked at."""


ChangeKind = Literal["sync format", "compression", "sync delay", "batch"]


@dataclass(frozen=True)
class TrainingChange:
    """A change, and the plan that was found with it.

    Attributes:
        kind: sums of gradients rounded, or compressed, or applied a step later, or a larger batch in
            microbatches of the same size.
        name: the format; by how many steps; or how many times as large the batch is.
        parallel: the parallelism of the plan.
        microbatches: of its step.
        iteration_s: its predicted step.
        gain: samples a second, as a multiple of those of the fastest plan without the change.
    """

    kind: ChangeKind
    name: str
    parallel: Parallel
    microbatches: int
    iteration_s: float
    gain: float


def find_training_changes(
    plan: Plan, budget_s: float = MOST_S, profile: Profile | None = None
) -> list[TrainingChange]:
    """The best plan for each change that gains enough, in the parallelisms that have plans.

    None for a plan that was not searched for, for one pipeline that was not chosen among parallelisms, with a
    parameter server, and where local steps are ``auto``. Of rounds only the format of
    their average is looked at.

    Args:
        budget_s: seconds for all of it, ``MOST_S`` at most.
        profile: which the plan was made from; None: what compressing saves is not looked at.
    """
    searched = plan.strategy in ("heuristic", "optimal") and plan.problem.objective == "iteration"
    if plan.problem.rhythm.is_stale or plan.problem.rhythm.local_steps == AUTO_STEPS:
        # no format goes with a parameter server; with auto other local steps would be chosen for it
        return []
    if not searched or not (plan.forms or plan.sync is not None) or plan.predicted.iteration_s <= 0:
        return []
    known_s = [outcome.iteration_s for outcome in plan.forms if outcome.iteration_s is not None]
    fastest_s = min([plan.predicted.iteration_s, *known_s])
    deadline = time.perf_counter() + min(budget_s, MOST_S)
    tries = list(_changed(plan, profile))
    best: dict[ChangeKind, TrainingChange] = {}
    for number, (kind, name, problem) in enumerate(tries):
        left_s = max(0.0, deadline - time.perf_counter())
        try:
            changed = plan_problem(problem, "heuristic", left_s / (len(tries) - number))
        except (InfeasibleError, UndecidedError):
            continue
        step_s = changed.predicted.iteration_s
        factor = problem.microbatches / plan.problem.microbatches
        gain = factor * fastest_s / step_s if step_s > 0 else 0.0
        if gain >= WORTH and (kind not in best or gain > best[kind].gain * (1 + SAME)):
            best[kind] = TrainingChange(kind, name, problem.parallel, problem.microbatches, step_s, gain)
    return list(best.values())


def _changed(plan: Plan, profile: Profile | None) -> Iterator[tuple[ChangeKind, str, Problem]]:
    """The changed problems: kind, name, problem."""
    parallelisms = [outcome.parallel for outcome in plan.forms if outcome.iteration_s is not None] or [
        plan.problem.parallel
    ]
    for parallelism in parallelisms:
        problem = with_parallelism(plan.problem, parallelism)
        if problem.rhythm.is_rounds:
            if plan.sync is not None and problem.sync_format == "float32":
                yield "sync format", "int8", problem.model_copy(update={"sync_format": "int8"})
            return
        if parallelism != PIPELINE and problem.sync_format in ("float32", "fixed32"):
            yield "sync format", "bfloat16", problem.model_copy(update={"sync_format": "bfloat16"})
            if profile is not None and problem.rhythm.is_synchronous:
                compressed = problem.model_copy(update={"sync_format": COMPRESSED})
                yield "compression", COMPRESSED, with_matrices(compressed, profile)
        delayable = problem.rhythm.is_synchronous and problem.sync_format in ("float32", *ROUNDED_FORMATS)
        if parallelism != PIPELINE and delayable:
            yield "sync delay", "1", problem.model_copy(update={"rhythm": Rhythm(delay=1)})
        try:
            larger = {**dict(problem), "microbatches": LARGER * problem.microbatches}
            yield "batch", str(LARGER), Problem.model_validate(larger)
        except InvalidRecordError:
            continue  # more microbatches than can be computed with
