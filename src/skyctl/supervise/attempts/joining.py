"""What is known of a node that comes to a run under way: from a plan, from a profile, or measured now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skyctl.control.problem import build_problem
from skyctl.control.request import Request, send_workload
from skyctl.errors import InputError, MismatchError, NodeError
from skyctl.files import recent_profiles
from skyctl.records.cluster import Cluster
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.remote.session import Session
from skyctl.supervise.attempts.replanning import node_of


def known_problem(
    name: str,
    problems: Sequence[Problem],
    plan: Plan,
    cluster: Cluster,
    session: Session,
    request: Request,
) -> Problem:
    """A problem of the same layers that has the node's devices.

    Args:
        problems: those that may have them, the first one counts.
        plan: what the run goes by now.
        session: to measure the node with, alone, where nothing else knows it.

    Raises:
        NodeError: it could not be measured.
    """
    for problem in problems:
        if any(node_of(device.id) == name for device in problem.devices):
            return problem
    return _profiled(name, plan, cluster) or _measured(name, plan, cluster, session, request)


def _profiled(name: str, plan: Plan, cluster: Cluster) -> Problem | None:
    """From the newest of the cluster's profiles that has the node with this workload."""
    ref = plan.workload
    for profile in recent_profiles(cluster.name):
        known = profile.workload
        if known is None or ref is None or (known.batch_size, known.dtype) != (ref.batch_size, ref.dtype):
            continue
        if profile.encrypted != plan.encrypted:
            continue
        if known.source != ref.source or not any(device.node == name for device in profile.devices):
            continue
        try:
            made = build_problem(profile, plan.problem.microbatches, schedule=plan.problem.schedule)
        except (InputError, MismatchError):
            continue
        if len(made.layers) == len(plan.problem.layers):
            return made
    return None


def _measured(name: str, plan: Plan, cluster: Cluster, session: Session, request: Request) -> Problem:
    """Measures that node's devices alone; of links to others nothing is known."""
    from skyctl.probe.collect import probe
    from skyctl.workload.workload import load

    spec = replace(request.spec, random_inputs=True, data_path=None)
    workload = load(request.spec)
    alone = Cluster(name=cluster.name, nodes=(cluster.node(name),))
    told = send_workload(spec, {name: session}, with_data=())
    profile = probe(
        alone, {name: session}, workload, spec, [plan.problem.microbatches], node_specs=told, how_links="none"
    )
    if not profile.devices:
        why = profile.failures[0].error if profile.failures else "it has no device"
        raise NodeError(f"it could not be measured: {why}", node=name)
    return build_problem(profile, plan.problem.microbatches, schedule=plan.problem.schedule)
