"""The comparison again with one thing changed: the number of microbatches, or of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from skyctl.compare.rows import Outcome
from skyctl.compare.sweeps import Sweep, SweepPoint, point
from skyctl.control.comparing import Comparing, outcomes_of, some_plan
from skyctl.control.planning import PlanOptions
from skyctl.errors import InputError
from skyctl.records.cluster import node_of
from skyctl.records.profile import Profile

LEAST_S = 1.0
"""So long a search may take at each point, however many there are."""

Progress = Callable[[str], None]


def sweep_microbatches(
    job: Comparing, profile: Profile, values: Sequence[int], on_progress: Progress
) -> tuple[list[Outcome], Sweep]:
    """The comparison at the best of these numbers, and what each of them would give.

    The time limit is shared by the points; the best one is planned again with all of it where nothing was
    proved.

    Raises:
        InfeasibleError, UndecidedError: no strategy has a plan at any of them.
    """
    ref = job.request.ref(job.workload)
    tried: list[tuple[int, list[Outcome]]] = []
    for value in values:
        on_progress(f"planning for {value} microbatches")
        options = _within(replace(job.options, microbatches=value), len(values))
        tried.append((value, outcomes_of(profile, options, ref, job.strategies)))
    chosen, outcomes = min(tried, key=lambda one: _best_s(one[1]))
    some_plan([outcome for _, found in tried for outcome in found])
    if not _proved(outcomes) and len(values) > 1:
        on_progress(f"planning for {chosen} microbatches, with all of the time")
        options = replace(job.options, microbatches=chosen)
        again = outcomes_of(profile, options, ref, job.strategies)
        outcomes = min(outcomes, again, key=_best_s)
        tried = [(value, outcomes if value == chosen else found) for value, found in tried]
    points = tuple(point(value, found) for value, found in tried)
    return outcomes, Sweep(kind="microbatches", points=points, chosen=chosen)


def sweep_nodes(
    job: Comparing,
    profile: Profile,
    outcomes: Sequence[Outcome],
    counts: Sequence[int],
    on_progress: Progress,
) -> Sweep:
    """What the first nodes by speed would give, for each number of them; all else as in ``outcomes``.

    Nodes that ``--pin-first`` and ``--pin-last`` name come first, as there is no plan without them.

    Raises:
        InputError: more nodes than were measured are asked for.
    """
    order = by_speed(outcomes, [*(job.options.first_stage or ()), *(job.options.last_stage or ())])
    most = max(counts)
    if most > len(order):
        raise InputError(
            f"--nodes {most}: {len(order)} node{'s were' if len(order) != 1 else ' was'} measured",
            hint=f"at most --nodes 1..{len(order)}, or --nodes 1..N for all",
        )
    made = next(o.plan.problem for o in outcomes if o.plan is not None)
    ref = job.request.ref(job.workload)
    points: list[SweepPoint] = []
    for count in counts:
        names = order[:count]
        added = names[-1] if count > 1 else None
        if count == len(order):
            points.append(point(count, outcomes, nodes=names, added=added))
            continue
        on_progress(f"planning for {count} of {len(order)} nodes")
        options = replace(job.options, only_nodes=names, microbatches=made.microbatches)
        found = outcomes_of(profile, _within(options, len(counts)), ref, job.strategies)
        points.append(point(count, found, nodes=names, added=added))
    return Sweep(kind="nodes", points=tuple(points), chosen=len(order) if len(order) in counts else None)


def by_speed(outcomes: Sequence[Outcome], first: Sequence[str] = ()) -> list[str]:
    """The nodes of the outcomes' problem, the fastest on the whole model first; ``first`` before all."""
    problem = next(o.plan.problem for o in outcomes if o.plan is not None)
    rates: dict[str, float] = {}
    for device in problem.devices:
        each_s = problem.alone_s(device)
        node = node_of(device.id)
        rates[node] = rates.get(node, 0.0) + (1 / each_s if each_s > 0 else 0.0)
    return sorted(rates, key=lambda node: (node not in first, -rates[node]))


def _within(options: PlanOptions, points: int) -> PlanOptions:
    return replace(options, time_limit_s=max(LEAST_S, options.time_limit_s / points))


def _best_s(outcomes: Sequence[Outcome]) -> float:
    steps = [o.plan.predicted.iteration_s for o in outcomes if o.plan is not None]
    return min(steps, default=float("inf"))


def _proved(outcomes: Sequence[Outcome]) -> bool:
    """Whether more time would change nothing."""
    searched = [o for o in outcomes if o.strategy == "optimal"]
    return all(o.plan is not None and o.plan.certificate.status == "optimal" for o in searched)
