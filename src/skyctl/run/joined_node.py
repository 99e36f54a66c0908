"""A node that comes to a run under way: what is known of it, and the run's problem with its devices.

It is known from a plan, from a profile of the cluster, or measured now. Whether a plan with it is worth a
restart is for others to decide (``plan_update.worth_moving``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from skyctl.errors import InputError, MismatchError, NodeError
from skyctl.files import recent_profiles
from skyctl.jobs.training_request import TrainingRequest, send_workload
from skyctl.learning.observations import gather_evidence
from skyctl.learning.problem_from_profile import build_problem
from skyctl.learning.step_factors import with_observed_factors
from skyctl.planner.problem_parts import shared_among
from skyctl.planning.backend_choice import costs_of, profile_over, uncarried
from skyctl.records.backend import GLOO, Backend
from skyctl.records.cluster import Cluster, node_of
from skyctl.records.plan import Plan
from skyctl.records.problem import Link, Problem, SharedResource
from skyctl.records.profile import Profile
from skyctl.remote.agent_session import Session
from skyctl.run.plan_update import without_nodes


def problem_with_node(
    name: str,
    problems: Sequence[Problem],
    plan: Plan,
    run: Problem,
    cluster: Cluster,
    session: Session,
    request: TrainingRequest,
) -> Problem:
    """A problem of the same layers that has the node's devices, with all that plans of the run's form need.

    Args:
        problems: those that may have them, the first one counts.
        plan: what the run goes by now; it may be a pipeline only because nodes are missing.
        run: of the form and rhythm that the run was begun with.
        session: to measure the node with, alone, where nothing else knows it.

    Raises:
        NodeError: it could not be measured.
    """
    for problem in problems:
        if any(node_of(device.id) == name for device in problem.devices):
            return problem
    from_profile = _from_profile(name, plan, run, cluster)
    return from_profile or _from_measurement(name, plan, run, cluster, session, request)


def missing_figures(problem: Problem, run: Problem, node: str) -> str | None:
    """The figures of a node's devices that plans of the run's form need and nobody knows, in words; or None.

    How uneven a device's steps are only a run can show, so of a node that is new to a parameter server
    nothing is known.
    """
    if not run.rhythm.is_stale:
        return None
    unknown = [
        device.id for device in problem.devices if node_of(device.id) == node and not device.step_factors
    ]
    if not unknown:
        return None
    return f"no run has shown how uneven steps of {', '.join(unknown)} are; they count as even"


def with_node(problem: Problem, other: Problem, node: str) -> Problem:
    """``problem`` with a node's devices as ``other`` has them; a link nobody has measured is as the slowest.

    The node's own devices of before, if it had any, are replaced.
    """
    new = [device for device in other.devices if node_of(device.id) == node]
    ids = {device.id for device in new}
    base = without_nodes(problem, {node: ""}) if len(ids) < len(problem.devices) else problem
    devices = {device.id: device for device in (*base.devices, *new)}
    by_pair = {(link.source, link.target): link for link in (*problem.links, *other.links)}
    links = dict.fromkeys((link.source, link.target) for link in base.links)
    made: list[Link] = [by_pair[pair] for pair in links]
    apart = [link for link in problem.links if node_of(link.source) != node_of(link.target)]
    for here in ids:
        for there in devices:
            for pair in ((here, there), (there, here)):
                if here == there or node_of(there) == node or pair in links:
                    continue
                links[pair] = None
                if pair in by_pair:
                    made.append(by_pair[pair])
                elif apart:
                    slowest = min(apart, key=lambda link: link.bandwidth_bytes_per_s)
                    made.append(slowest.model_copy(update={"source": pair[0], "target": pair[1]}))
    times = {**base.times, **{name: times for name, times in other.times.items() if name in ids}}
    named = [*(base.helpers or ()), *(name for name in other.helpers or () if name in ids)]
    kept: dict[str, Any] = {
        "first_stage": problem.first_stage,
        "last_stage": problem.last_stage,
        "helpers": None if problem.helpers is None else tuple(dict.fromkeys(named)),
    }
    return base.model_copy(
        update={
            "devices": tuple(devices.values()),
            "times": times,
            "links": tuple(made),
            "shared": _joined(base.shared, other.shared, node, devices),
            **kept,
        }
    )


def _joined(
    mine: Sequence[SharedResource], others: Sequence[SharedResource], node: str, ids: Collection[str]
) -> tuple[SharedResource, ...]:
    """The resources of ``mine``, and those that the links of the new node share."""
    by_name = {resource.name: resource for resource in mine}
    for other in shared_among(others, ids):
        new = tuple(pair for pair in other.links if node in map(node_of, pair))
        if new:
            own = by_name.get(other.name)
            pairs = dict.fromkeys((*(own.links if own is not None else ()), *new))
            by_name[other.name] = (own or other).model_copy(update={"links": tuple(pairs)})
    return tuple(by_name.values())


def _from_profile(name: str, plan: Plan, run: Problem, cluster: Cluster) -> Problem | None:
    """The problem from the newest of the cluster's profiles that has the node with this workload."""
    ref = plan.workload
    profiles = recent_profiles(cluster.name)
    for profile in profiles:
        profiled = profile.workload
        if (
            profiled is None
            or ref is None
            or (profiled.batch_size, profiled.dtype) != (ref.batch_size, ref.dtype)
        ):
            continue
        if profile.encrypted != plan.encrypted:
            continue
        devices = [device for device in profile.devices if device.node == name]
        if (profiled.source, profiled.lora) != (ref.source, ref.lora) or not devices:
            continue
        try:
            made = _build_problem(gather_evidence(profile, profiles), run, costs_of(plan))
        except (InputError, MismatchError):
            continue
        if len(made.layers) == len(plan.problem.layers):
            return made
    return None


def _from_measurement(
    name: str, plan: Plan, run: Problem, cluster: Cluster, session: Session, request: TrainingRequest
) -> Problem:
    """The problem from a measurement of that node alone; its links to others stay unknown."""
    from skyctl.probe.cluster_probe import ProbeOptions, measure_cluster
    from skyctl.workload.workload import load_workload

    spec = replace(request.spec, random_inputs=True, data_path=None)
    workload = load_workload(request.spec)
    alone = Cluster(name=cluster.name, nodes=(cluster.node(name),))
    node_specs = send_workload(spec, {name: session}, with_data=())
    profile = measure_cluster(
        alone,
        {name: session},
        workload,
        spec,
        [plan.problem.microbatches],
        node_specs=node_specs,
        options=ProbeOptions(link_selection="none", gloo=costs_of(plan) == GLOO),
    )
    if not profile.devices:
        why = profile.failures[0].error if profile.failures else "it has no device"
        raise NodeError(f"it could not be measured: {why}", node=name)
    return _build_problem(profile, run, costs_of(plan))


def _build_problem(profile: Profile, run: Problem, costs: Backend) -> Problem:
    """The problem of that profile, asked as the run's own was; ``costs``: over what messages go."""
    if costs == GLOO and not uncarried(GLOO, [device.id for device in profile.devices]):
        profile, _ = profile_over(profile, GLOO)
    made = build_problem(profile, run.microbatches, schedule=run.schedule, parallel=run.parallel)
    return with_observed_factors(made.model_copy(update={"rhythm": run.rhythm}), profile, {})
