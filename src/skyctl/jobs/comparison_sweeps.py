"""A comparison with one thing changed: planned for each number of microbatches, or of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from skyctl.compare.outcome import ALONE, StrategyOutcome, pipeline_problem
from skyctl.compare.sweeps import ComparisonSweep, NodesPoint, sweep_point
from skyctl.errors import InputError
from skyctl.jobs.comparison_job import (
    ComparisonJob,
    OnProgress,
    of_strategies,
    plan_each,
    require_a_plan,
    with_best_alone,
    within_limit,
)
from skyctl.planning.schedule_choice import AUTO
from skyctl.records.cluster import node_of
from skyctl.records.problem import Problem
from skyctl.records.profile import Profile

MeasureAll = Callable[[list[StrategyOutcome]], list[StrategyOutcome]]
"""Runs all plans of these outcomes, for real."""


def sweep_microbatches(
    job: ComparisonJob, profile: Profile, values: Sequence[int], on_progress: OnProgress
) -> tuple[list[StrategyOutcome], ComparisonSweep]:
    """The comparison at the best of these numbers, and what each of them would give.

    The time limit is shared by the points; the best one is planned again with all of it where nothing was
    proved.

    Raises:
        InfeasibleError, UndecidedError: no strategy has a plan at any of them.
    """
    ref = job.request.ref(job.workload.digest)
    tried: list[tuple[int, list[StrategyOutcome]]] = []
    for value in values:
        on_progress(f"planning for {value} microbatches")
        options = within_limit(replace(of_strategies(job.options), microbatches=value), len(values))
        tried.append((value, plan_each(profile, options, ref, job.strategies)))
    chosen, outcomes = min(tried, key=lambda trial: _best_s(trial[1]))
    require_a_plan([outcome for _, rows in tried for outcome in rows])
    if not _all_proved(outcomes) and len(values) > 1:
        on_progress(f"planning for {chosen} microbatches, with all of the time")
        options = replace(of_strategies(job.options), microbatches=chosen)
        again = plan_each(profile, options, ref, job.strategies)
        outcomes = min(outcomes, again, key=_best_s)
        tried = [(value, outcomes if value == chosen else rows) for value, rows in tried]
    points = tuple(sweep_point(value, rows) for value, rows in tried)
    options = replace(of_strategies(job.options), microbatches=chosen)
    outcomes = with_best_alone(profile, options, ref, outcomes)
    sweep = ComparisonSweep(kind="microbatches", points=points, chosen=chosen)
    return job.with_rows_beside(profile, job.options, outcomes), sweep


def plan_nodes(
    job: ComparisonJob,
    profile: Profile,
    outcomes: Sequence[StrategyOutcome],
    counts: Sequence[int],
    on_progress: OnProgress,
) -> list[NodesPoint]:
    """The outcomes with the first nodes by speed, for each number of them; all else as in ``outcomes``.

    Nodes that ``--pin-first`` and ``--pin-last`` name come first, as there is no plan without them.

    Raises:
        InputError: more nodes than were measured are asked for.
    """
    order = nodes_by_speed(outcomes, [*(job.options.first_stage or ()), *(job.options.last_stage or ())])
    most = max(counts)
    if most > len(order):
        raise InputError(
            f"--nodes {most}: {len(order)} node{'s were' if len(order) != 1 else ' was'} measured",
            hint=f"at most --nodes 1..{len(order)}, or --nodes 1..N for all",
        )
    ref = job.request.ref(job.workload.digest)
    points: list[NodesPoint] = []
    for count in counts:
        names = tuple(order[:count])
        if count == len(order):
            points.append(NodesPoint(names, outcomes))
            continue
        on_progress(f"planning for {count} of {len(order)} nodes")
        options = replace(job.options, only_nodes=names, microbatches=_problem_of(outcomes).microbatches)
        options = within_limit(options, len(counts))
        alike = of_strategies(options)
        rows = with_best_alone(profile, alike, ref, plan_each(profile, alike, ref, job.strategies))
        if options.parallel == AUTO:
            rows = job.with_rows_beside(profile, options, rows)
        points.append(NodesPoint(names, rows))
    return points


def measure_nodes(
    points: Sequence[NodesPoint],
    planned: Sequence[StrategyOutcome],
    measured: Sequence[StrategyOutcome],
    measure: MeasureAll,
) -> list[NodesPoint]:
    """Runs the last strategy's plan of each point, under a name that says which.

    Args:
        planned: the comparison's own outcomes, which the point with all nodes has.
        measured: the same, measured.
    """
    todo = {
        f"{point.outcomes[-1].strategy}, {len(point.nodes)} node{'s' if len(point.nodes) > 1 else ''}": point
        for point in points
        if point.outcomes is not planned
    }
    ran = measure([replace(point.outcomes[-1], strategy=name) for name, point in todo.items()])
    done = {
        point.nodes: replace(outcome, strategy=point.outcomes[-1].strategy)
        for point, outcome in zip(todo.values(), ran, strict=True)
    }
    return [
        NodesPoint(
            point.nodes, [*point.outcomes[:-1], done[point.nodes]] if point.nodes in done else measured
        )
        for point in points
    ]


def _problem_of(outcomes: Sequence[StrategyOutcome]) -> Problem:
    problem = pipeline_problem(outcomes)
    assert problem is not None
    return problem


def nodes_by_speed(outcomes: Sequence[StrategyOutcome], first: Sequence[str] = ()) -> list[str]:
    """The nodes of the outcomes' problem, the fastest on the whole model first; ``first`` before all."""
    problem = _problem_of(outcomes)
    rates: dict[str, float] = {}
    for device in problem.devices:
        each_s = problem.alone_s(device)
        node = node_of(device.id)
        rates[node] = rates.get(node, 0.0) + (1 / each_s if each_s > 0 else 0.0)
    return sorted(rates, key=lambda node: (node not in first, -rates[node]))


def _best_s(outcomes: Sequence[StrategyOutcome]) -> float:
    """The least predicted step, of pipelines where there are any."""
    pipelines = [o for o in outcomes if o.strategy != ALONE and o.plan is not None] or outcomes
    steps = [o.plan.step_s for o in pipelines if o.plan is not None]
    return min(steps, default=float("inf"))


def _all_proved(outcomes: Sequence[StrategyOutcome]) -> bool:
    """Whether a longer search would change nothing: what was searched is proved."""
    searched = [o for o in outcomes if o.strategy == "optimal"]
    return all(o.plan is not None and o.plan.certificate.status == "optimal" for o in searched)
