"""Which parallelism: what each comes to for the same batch, and the simplest that is hardly slower.

A plan is simpler the less can go wrong with it: one device needs no other; with data parallelism the devices
meet once a step, and each has the whole model if the others are lost; in a pipeline every microbatch waits
for every link; several pipelines have both kinds of traffic. The order goes by what a plan is, not by the
parallelism it was looked for in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from skyctl.errors import InfeasibleError, InputError, UndecidedError, WorkloadError
from skyctl.planner.problem_parts import with_devices
from skyctl.planning.schedule_choice import NEAR_BEST
from skyctl.records.plan import ParallelismOutcome, Plan
from skyctl.records.problem import Objective, Parallel, Problem, SyncRoutes
from skyctl.records.rhythm import Rhythm

if TYPE_CHECKING:
    from torch import nn

ParallelChoice = Parallel | Literal["auto"]

DATA: Parallel = "data"
HYBRID: Parallel = "hybrid"
PIPELINE: Parallel = "pipeline"
PARALLELISMS: tuple[Parallel, ...] = get_args(Parallel)
STAGE_ORDERS = ("eager-1f1b", "zero-bubble", "gpipe")
"""Schedules that order a pipeline's stages: those that plans of several pipelines can't have."""
REPLICAS_ONLY: tuple[SyncRoutes, ...] = ("server", "trees")
"""Routes between devices that hold all layers each: those that hybrids don't have."""

ParallelismSearch = Callable[[Parallel, float], Plan]
"""(parallelism, time limit in seconds) → its best plan; raises InfeasibleError or UndecidedError."""


@dataclass(frozen=True)
class ParallelismResult:
    """The result of looking for plans of one parallelism.

    Attributes:
        plan: the best that was found.
        reason: why there is none.
        fits: False: proved that none fits the devices.
        looked: False: what was asked for does not go with the parallelism.
    """

    parallel: Parallel
    plan: Plan | None = None
    reason: str | None = None
    fits: bool = True
    looked: bool = True


def parallelism_contradictions(
    *,
    schedule: str | None,
    objective: Objective | None,
    sync: SyncRoutes | None,
    sums: Sequence[str],
    stale: bool = False,
    helpers: bool,
    whole_blocks: bool,
) -> dict[Parallel, str]:
    """By parallelism that does not go with what was asked for, why not; parallelisms that do are left out.

    Args:
        schedule: as asked for; None or ``auto``: any.
        objective: of the problem.
        sync: the routes that were asked for.
        sums: the options given that say how gradients are summed (``--sync``, ``--sync-format``).
        stale: whether a parameter server is to take the place of sums.
        helpers: whether devices were named that hold nothing.
        whole_blocks: whether cuts may lie between transformer blocks only.
    """
    reasons: dict[Parallel, str] = {}
    if sums:
        reasons[PIPELINE] = f"{sums[0]} says how gradients are summed, and one pipeline sums none"
    if stale:
        needed = "with --staleness one device holds the weights for others that hold all layers, too"
        reasons |= {PIPELINE: needed, HYBRID: needed}
    several: str | None = None
    if schedule in STAGE_ORDERS:
        several = f"schedule {schedule} goes with one pipeline only"
    elif objective == "bottleneck":
        several = "objective bottleneck looks at the slowest stage of one pipeline"
    elif whole_blocks:
        several = "--whole-blocks says where one pipeline is cut"
    if several is not None:
        reasons |= {DATA: several, HYBRID: several}
    elif sync in REPLICAS_ONLY:
        reasons[HYBRID] = f"--sync {sync} goes with --parallel data only"
    elif helpers:
        reasons[HYBRID] = "devices that only help to sum go with --parallel data only"
    return reasons


def parallelisms_not_exported(trainer: str) -> dict[Parallel, str]:
    """The parallelisms that another trainer does not take, and why; ``trainer``: as --export names it."""
    reason = f"--export {trainer}: {trainer} takes one pipeline"
    return {DATA: reason, HYBRID: reason}


def parallelisms_left_out_by(layers: Sequence[nn.Module]) -> dict[Parallel, str]:
    """The parallelisms that can't train a model of these layers, whose gradients can't be summed, and why."""
    from skyctl.worker.sums.summed_gradients import check_summable

    try:
        check_summable(layers)
    except WorkloadError as exc:
        return {DATA: exc.message, HYBRID: exc.message}
    return {}


def choose_parallelism(search: ParallelismSearch, left_out: Mapping[Parallel, str], limit_s: float) -> Plan:
    """The simplest plan within ``NEAR_BEST`` of the fastest of all; it says what each parallelism came to.

    Args:
        left_out: parallelisms that are not looked at, and why.
        limit_s: seconds for all parallelisms together; each gets an equal part of what is left.

    Raises:
        InputError: no parallelism is left.
        InfeasibleError: proved for every parallelism that is left.
        UndecidedError: for some nothing was found, and nothing proved.
    """
    deadline = time.perf_counter() + limit_s
    results = []
    wanted = [parallelism for parallelism in PARALLELISMS if parallelism not in left_out]
    for parallelism in PARALLELISMS:
        if parallelism in left_out:
            results.append(ParallelismResult(parallelism, reason=left_out[parallelism], looked=False))
            continue
        left_s = max(0.0, deadline - time.perf_counter())
        results.append(look_for(parallelism, search, left_s / (len(wanted) - wanted.index(parallelism))))
    chosen = choose_among(results)
    if chosen is None:
        raise _failure(results)
    return chosen


def look_for(parallelism: Parallel, search: ParallelismSearch, limit_s: float) -> ParallelismResult:
    """The result of looking for plans of one parallelism, also if there are none."""
    try:
        return ParallelismResult(parallelism, search(parallelism, limit_s))
    except (InfeasibleError, UndecidedError) as exc:
        return ParallelismResult(parallelism, reason=exc.message, fits=not isinstance(exc, InfeasibleError))


def with_parallelism(problem: Problem, parallel: Parallel) -> Problem:
    """The same problem for plans of another parallelism; one of rounds has no other.

    A pipeline's has no devices that are to hold nothing, and no rhythm of sums; that of several pipelines has
    no schedule that only one can have. A parameter server is between devices that hold all layers each, so
    others sum.

    Raises:
        InfeasibleError: for a pipeline, and all devices are to help.
    """
    if problem.rhythm.is_rounds:
        return problem
    if parallel == "pipeline" and problem.helpers:
        left = {device.id for device in problem.devices} - {*problem.helpers}
        if not left:
            raise InfeasibleError(
                "every device is to help, and none is left that may hold the model",
                hint="name fewer helpers (--helper)",
            )
        problem = with_devices(problem, left)
    update: dict[str, Any] = {"parallel": parallel}
    if parallel == "pipeline":
        update["rhythm"] = Rhythm()
    elif problem.schedule in STAGE_ORDERS:
        update["schedule"] = "1f1b"
    if parallel != "data" and problem.rhythm.is_stale:
        update["rhythm"] = Rhythm()
    return problem.model_copy(update=update)


def choose_among(results: Sequence[ParallelismResult]) -> Plan | None:
    """The simplest plan within ``NEAR_BEST`` of the fastest, with what each came to; None: no plan.

    Of plans as simple it is the one of the parallelism that comes first.
    """
    plans = [result.plan for result in results if result.plan is not None and result.looked]
    if not plans:
        return None
    limit_s = min(plan.step_s for plan in plans) * (1 + NEAR_BEST)
    near = [plan for plan in plans if plan.step_s <= limit_s]
    chosen = min(near, key=lambda plan: (intricacy(plan), PARALLELISMS.index(plan.problem.parallel)))
    return chosen.model_copy(update={"forms": tuple(_outcome(result, chosen) for result in results)})


def intricacy(plan: Plan) -> int:
    """0: one device; 1: devices that hold all layers each; 2: one pipeline; 3: several."""
    stages = len(plan.placed_stages)
    if stages == 1:
        return 0
    if len(plan.pipelines) == 1:
        return 2
    return 1 if len(plan.pipelines) == stages else 3


def _outcome(result: ParallelismResult, chosen: Plan) -> ParallelismOutcome:
    """As the plan that was chosen records it.

    A parallelism's bound is kept where its problem has the chosen one's microbatches: only then can it be
    found again from the plan.
    """
    plan = result.plan if result.looked else None
    if plan is None:
        return ParallelismOutcome(
            parallel=result.parallel,
            fits=result.fits,
            iteration_s=None,
            lower_bound_s=None,
            reason=result.reason,
        )
    sure = plan.certificate
    comparable = plan.problem.microbatches == chosen.problem.microbatches
    bound_s = sure.lower_bound_s if comparable and plan.problem.objective == "iteration" else None
    return ParallelismOutcome(
        parallel=result.parallel,
        fits=True,
        iteration_s=plan.predicted.iteration_s,
        lower_bound_s=bound_s,
        schedule=plan.problem.schedule,
        witness=sure.witness if bound_s is not None else None,
    )


def _failure(results: Sequence[ParallelismResult]) -> InfeasibleError | UndecidedError | InputError:
    """The error to raise where no parallelism has a plan."""
    looked = [result for result in results if result.looked]
    each = "".join(f"\n  {result.parallel}: {result.reason}" for result in results)
    if not looked:
        return InputError(f"no form of plans goes with these options:{each}", hint="leave one of them out")
    if any(result.fits for result in looked):
        return UndecidedError(
            f"no plan was found in time:{each}", hint="a longer --time-limit, or one form (--parallel)"
        )
    return InfeasibleError(
        f"no form gives a plan that fits:{each}",
        hint="add memory or a machine, or use more microbatches (smaller ones)",
    )
