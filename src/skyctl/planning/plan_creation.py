"""Plans from a profile, a run or a problem file: the best over what may be chosen, by one strategy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from skyctl.errors import InfeasibleError, InputError, UndecidedError
from skyctl.learning.corrections import Corrections, learn_corrections
from skyctl.learning.observations import correct_from_run
from skyctl.learning.problem_from_profile import (
    build_problem,
    measured_workload,
)
from skyctl.learning.step_factors import with_measured_factors, with_observed_factors
from skyctl.planner.api import plan
from skyctl.planner.prediction_interval import with_interval
from skyctl.planner.transformer_blocks import model_parts
from skyctl.planning.assignment import plan_assigned
from skyctl.planning.backend_choice import replanned_choice
from skyctl.planning.compressed_sums import with_matrices
from skyctl.planning.link_dtypes import with_link_dtypes
from skyctl.planning.parallelism_choice import (
    DATA,
    HYBRID,
    PIPELINE,
    choose_parallelism,
    parallelism_contradictions,
    with_parallelism,
)
from skyctl.planning.plan_options import PlanOptions, rhythm_options
from skyctl.planning.plan_pairs import refuse_broken_pairs
from skyctl.planning.problem_overrides import override_problem, owned_devices, parallelism_fields
from skyctl.planning.round_owners import with_rounds
from skyctl.planning.schedule_choice import AUTO, ScheduleChooser, promising_first, with_schedule
from skyctl.records.measurement import Measurement
from skyctl.records.plan import Plan
from skyctl.records.problem import Parallel, Problem
from skyctl.records.profile import Profile
from skyctl.records.rhythm import Rhythm

FLOAT32 = "float32"


def problems_of(profile: Profile, options: PlanOptions) -> list[Problem]:
    """One problem for each measured number of microbatches, or the one asked for; stages may recompute."""
    workload = measured_workload(profile)
    measured = [shape.microbatches for shape in workload.shapes]
    wanted = measured if options.microbatches is None else [options.microbatches]
    schedule = None if options.schedule == AUTO else options.schedule
    fields = parallelism_fields(options, options.parallel or PIPELINE)
    # plans of all parallelisms are made from one with figures of sums
    parallel = DATA if options.parallel == AUTO else options.parallel or PIPELINE
    problems = [
        build_problem(
            profile,
            microbatches,
            schedule=schedule or "1f1b",
            objective=options.objective or "iteration",
            first_stage=options.first_stage,
            last_stage=options.last_stage,
            only_nodes=options.only_nodes,
            parallel=parallel,
        )
        for microbatches in wanted
    ]
    learned = [
        learn_corrections(profile, problem.microbatches).corrections if options.learn else Corrections()
        for problem in problems
    ]
    problems = [corrections.apply_to(problem) for corrections, problem in zip(learned, problems, strict=True)]
    nodes = options.only_nodes
    names = options.helpers and [name for name in options.helpers if nodes is None or name in nodes]
    problems = [
        problem.model_copy(
            update={"recompute": True, **fields, "helpers": owned_devices(problem, "--helper", names)}
        )
        for problem in problems
    ]
    problems = [with_rounds(with_matrices(problem, profile), options) for problem in problems]
    problems = [
        with_observed_factors(problem, profile, corrections.factors)
        for corrections, problem in zip(learned, problems, strict=True)
    ]
    return [with_link_dtypes(problem, options.link_dtype, workload.dtype) for problem in problems]


def plan_run(
    plan: Plan,
    done: Measurement,
    options: PlanOptions,
    pin_first: str | None = None,
    pin_last: str | None = None,
) -> tuple[Plan, list[str]]:
    """The best plan of a run's problem, corrected by what the run observed; and how, in words.

    Raises:
        InputError: the run was too short, or another number of microbatches is asked for.
    """
    microbatches = plan.problem.microbatches
    if options.microbatches not in (None, microbatches):
        raise InputError(
            f"run {done.run_id} had {microbatches} microbatches a step: its figures say nothing of "
            f"{options.microbatches}",
            hint="leave --from-run out: a plan from the profile uses what runs have seen, too",
        )
    if options.parallel is None:
        options = replace(options, parallel=plan.problem.parallel)
    if options.parallel == AUTO and plan.problem.parallel == PIPELINE and not plan.forms:
        unknown = f"run {done.run_id} was planned without what sums take (a plan from the profile has that)"
        options = replace(options, left_out={DATA: unknown, HYBRID: unknown})
    options = options.resolved_parallelism().with_chosen_schedule()
    problem, words = correct_from_run(plan, done)
    dtype = plan.workload.dtype if plan.workload is not None else FLOAT32
    problem = override_problem(problem, options, pin_first, pin_last, dtype)
    best = plan_best([with_measured_factors(problem, done)], options)
    kept = {"workload": plan.workload, "machines": plan.machines, "encrypted": plan.encrypted}
    backend = replanned_choice(plan.backend, best)
    return best.model_copy(update={**kept, "backend": backend}), words


def plan_best(candidates: Sequence[Problem], options: PlanOptions) -> Plan:
    """The best plan of problems that differ in their number of microbatches, with ``auto`` also in schedule.

    With ``auto`` as its parallelism it says what each came to. Its predicted step has an interval where the
    problems say how sure their figures are. With ``beside_pipeline`` a plan whose devices hold all layers
    each has a pipeline's step beside its own, where one is found in what is left of the time.

    Raises: see ``plan_profile``.
    """
    deadline = time.perf_counter() + options.time_limit_s
    options = options.resolved_parallelism()
    if options.parallel == AUTO and candidates[0].rhythm.is_rounds:
        options = replace(options, parallel=candidates[0].parallel)  # rounds have no other parallelism
    if options.parallel == AUTO:
        return with_interval(_plan_any_parallelism(candidates, options))
    best = with_interval(_plan_best(candidates, options))
    if best.problem.parallel != DATA or best.problem.rhythm.is_rounds or not options.beside_pipeline:
        return best  # a round is no step
    return best.model_copy(
        update={"pipeline_iteration_s": _pipeline_iteration_s(candidates, options, deadline)}
    )


def _plan_any_parallelism(candidates: Sequence[Problem], options: PlanOptions) -> Plan:
    """The simplest plan that is hardly slower than the fastest of all parallelisms that the options leave."""

    def search(parallelism: Parallel, limit_s: float) -> Plan:
        problems = [with_parallelism(problem, parallelism) for problem in candidates]
        return _plan_best(problems, replace(options, parallel=parallelism, time_limit_s=limit_s))

    return choose_parallelism(search, parallelisms_left_out(options, candidates[0]), options.time_limit_s)


def parallelisms_left_out(options: PlanOptions, problem: Problem | None = None) -> dict[Parallel, str]:
    """The parallelisms that ``auto`` does not look at, and why; ``problem``: has what options leave open."""
    sums = options.sum_options()
    if options.rhythm is None and problem is not None:
        sums += rhythm_options(problem.rhythm)
    contradictions = parallelism_contradictions(
        schedule=options.schedule,
        objective=options.objective or (problem.objective if problem is not None else None),
        sync=options.sync or (problem.sync if problem is not None else None),
        sums=sums,
        stale=_rhythm(options, problem).is_stale,
        helpers=bool(options.helpers or (problem is not None and problem.helpers)),
        whole_blocks=options.whole_blocks,
    )
    if options.rhythm is not None and options.rhythm.is_rounds:
        contradictions[HYBRID] = "--local-steps goes with --parallel data only"
    return {**contradictions, **options.left_out}


def _rhythm(options: PlanOptions, problem: Problem | None) -> Rhythm:
    """The rhythm that the options ask for, or else the problem's."""
    default = problem.rhythm if problem is not None else Rhythm()
    return default if options.rhythm is None else options.rhythm


def _pipeline_iteration_s(
    candidates: Sequence[Problem], options: PlanOptions, deadline: float
) -> float | None:
    """The predicted step of a quickly found pipeline for the same batch; None: none was found in time."""
    left_s = deadline - time.perf_counter()
    if left_s <= 0:
        return None
    pipelines = [with_parallelism(problem, PIPELINE) for problem in candidates]
    quick = replace(
        options,
        parallel=PIPELINE,
        helpers=None,
        strategy="heuristic",
        schedule=AUTO,
        assign_shares=None,
        time_limit_s=left_s,
    )
    try:
        return _plan_best(pipelines, quick).predicted.iteration_s
    except (InfeasibleError, UndecidedError):
        return None


def _plan_best(candidates: Sequence[Problem], options: PlanOptions) -> Plan:
    deadline = time.perf_counter() + options.time_limit_s
    searched = options.strategy == "optimal" and not options.assigned
    quick = replace(options, strategy="heuristic") if searched else options
    chooser = ScheduleChooser(
        lambda problem, limit_s: plan_problem(problem, quick, limit_s), options.time_limit_s
    )
    if options.schedule == AUTO and candidates[0].parallel == PIPELINE:
        chosen = chooser.choose(candidates)
        if chosen is None and searched:
            return _plan_least_memory(candidates, options, deadline)
        if chosen is None:
            raise _failure(chooser.failures)
        if not searched:
            return chosen
        candidates = [with_schedule(problem, chosen.problem.schedule) for problem in candidates]
    elif searched and len(candidates) > 1:
        chooser.try_all(candidates)
    return _plan_each(promising_first(candidates, chooser.plans), options, deadline)


def _plan_least_memory(candidates: Sequence[Problem], options: PlanOptions, deadline: float) -> Plan:
    """A plan where no quick one fits: by the simplest schedule, in half of the time, then with least memory.

    A proof for the schedule with the least memory holds for all.
    """
    now = time.perf_counter()
    try:
        simple = [with_schedule(problem, "1f1b") for problem in candidates]
        return _plan_each(simple, options, now + (deadline - now) / 2)
    except (InfeasibleError, UndecidedError):
        least = [with_schedule(problem, "sequential") for problem in candidates]
        return _plan_each(least, options, deadline)


def _plan_each(candidates: Sequence[Problem], options: PlanOptions, deadline: float) -> Plan:
    """The best plan of all problems; each but the last gets half of the time that is left."""
    plans: list[Plan] = []
    failures: list[InfeasibleError | UndecidedError] = []
    for number, problem in enumerate(candidates):
        left_s = max(0.0, deadline - time.perf_counter())
        share = 1.0 if number + 1 == len(candidates) else 0.5
        try:
            plans.append(plan_problem(problem, options, share * left_s))
        except (InfeasibleError, UndecidedError) as exc:
            failures.append(exc)
    if not plans:
        raise _failure(failures)
    return min(plans, key=lambda plan: plan.step_s)


def _failure(failures: Sequence[InfeasibleError | UndecidedError]) -> InfeasibleError | UndecidedError:
    """The error to raise for several problems: infeasible only where all are proved to be."""
    undecided = [exc for exc in failures if not isinstance(exc, InfeasibleError)]
    return undecided[-1] if undecided else failures[-1]


def plan_problem(problem: Problem, options: PlanOptions, time_limit_s: float | None = None) -> Plan:
    """A plan of one problem by one strategy, or the user's own assignment."""
    if options.named:
        model_parts(problem)
    limit = options.time_limit_s if time_limit_s is None else time_limit_s
    if options.assigned:
        chosen = plan_assigned(problem, options.assign, options.assign_shares)
    else:
        chosen = plan(problem, options.strategy, limit, whole_blocks=options.whole_blocks)
    refuse_broken_pairs(chosen)
    return chosen
