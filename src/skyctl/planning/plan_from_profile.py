"""The best plan of what a profile has measured, and what is to carry its tensors (``--backend``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.learning.cluster_changes import machines_of
from skyctl.learning.corrections import estimate_profile
from skyctl.planner.api import predict
from skyctl.planner.routes.route_names import name_routes
from skyctl.planning.backend_choice import (
    devices_in,
    profile_over,
    reason_for_ours,
    replanned_choice,
    uncarried,
    weigh_gloo,
    with_message_costs,
    with_ring_costs,
)
from skyctl.planning.parallelism_choice import DATA, HYBRID
from skyctl.planning.plan_creation import FLOAT32, parallelisms_left_out, plan_best, problems_of
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.backend import AUTO, GLOO, NCCL, SKYCTL, Backend, BackendChoice, BackendReason
from skyctl.records.plan import Plan, WorkloadRef
from skyctl.records.profile import Profile


def plan_profile(profile: Profile, options: PlanOptions, workload: WorkloadRef | None = None) -> Plan:
    """The best plan of the strategy over the schedules and numbers of microbatches that may be chosen.

    Raises:
        InputError: the backend asked for carries no device's tensors.
        InfeasibleError: proved for every one of them.
        UndecidedError: for some nothing was found, and nothing proved.
    """
    options = options.resolved_parallelism().with_chosen_schedule()
    best = _plan_backend(profile, options)
    ids = [device.id for device in best.problem.devices]
    doubts = estimate_profile(profile).contradictions if options.learn else ()
    update = {
        "workload": _compared(workload, profile) or best.workload,
        "machines": machines_of(profile, ids),
        "encrypted": profile.encrypted,
        "contradictions": tuple(
            contradiction
            for contradiction in doubts
            if {contradiction.device, contradiction.target or contradiction.device} <= set(ids)
        ),
    }
    return best.model_copy(update=update)


def _plan_backend(profile: Profile, options: PlanOptions) -> Plan:
    """The best plan over what is to carry its tensors, which it keeps."""
    asked = options.backend
    if asked is None:
        return plan_best(problems_of(profile, options), options)
    if asked == AUTO:
        return _plan_any_backend(profile, options)
    named = asked.backend if isinstance(asked, BackendChoice) else cast("Backend", asked)
    costs, unknown = profile_over(profile, named, options.only_nodes)
    plan = (
        _plan_over_gloo(costs, options) if named == GLOO else plan_best(problems_of(costs, options), options)
    )
    if named == NCCL and plan.helpers:  # they sum in a processor's memory
        options = replace(options, helpers=[], parallel=plan.problem.parallel)
        plan = plan_best(problems_of(costs, options), options)
    choice = replanned_choice(asked, plan) if isinstance(asked, BackendChoice) else None
    if choice is None:
        cost_backend = GLOO if named == GLOO and not unknown else SKYCTL
        choice = BackendChoice(backend=named, reason="asked", about=tuple(unknown), costs=cost_backend)
    other = SKYCTL if choice.costs == GLOO else GLOO if choice.reason == "slower" else None
    return _with_choice(plan, choice, profile, options, other)


def _plan_any_backend(profile: Profile, options: PlanOptions) -> Plan:
    """The best plan over Gloo or NCCL, where nothing speaks for ours; else over ours, and what does.

    Over Gloo it is searched for first; so there are two searches only where Gloo would be slower.
    """
    nodes = options.only_nodes
    devices = [device for device in profile.devices if nodes is None or device.node in nodes]
    names = [device.id for device in devices]
    reason = _reason_for_ours(profile, options, names)
    if reason is None and not uncarried(GLOO, names):
        costs, unknown = profile_over(profile, GLOO, nodes)
        if unknown:
            reason = "unmeasured", tuple(unknown)
        else:
            plan = _plan_over_gloo(costs, options)
            ours_s = _step_over(SKYCTL, plan, profile, options)
            choice = weigh_gloo(plan.predicted.iteration_s, ours_s, plan.helpers)
            if choice.backend == GLOO:
                return plan.model_copy(update={"backend": choice})
            reason = choice.reason, choice.about
    plan = plan_best(problems_of(profile, options), options)
    own = devices_in(plan)
    if uncarried(GLOO, names) and not uncarried(NCCL, own):  # of several kinds it has chosen one
        reason = _reason_for_ours(profile, options, own, plan.helpers)
    if reason is None:
        return plan.model_copy(update={"backend": BackendChoice(backend=NCCL, reason="cuda")})
    choice = BackendChoice(backend=SKYCTL, reason=reason[0], about=reason[1])
    return _with_choice(plan, choice, profile, options, GLOO if choice.reason == "slower" else None)


def _plan_over_gloo(costs: Profile, options: PlanOptions) -> Plan:
    """The best plan over Gloo: sums go over skyctl's routes, or in a ring by Gloo's own collective.

    That takes less of the processors, by which a ring may be the fastest where links are.

    Args:
        costs: the profile as if messages went over Gloo.
    """
    plan = plan_best(problems_of(costs, options), options)
    asked = options.sync in (None, "auto", "ring") and options.sync_format in (None, FLOAT32)
    plain = options.rhythm is None or options.rhythm.is_synchronous
    is_open = options.parallel == DATA or (
        options.parallel == AUTO and DATA not in parallelisms_left_out(options, plan.problem)
    )
    if not (asked and plain and is_open) or plan.problem.rhythm.is_rounds:
        return plan
    rings = with_ring_costs(costs, costs.links)
    if rings is None or len(costs.devices) < 2:
        return plan
    in_ring = replace(options, parallel=DATA, sync="ring", helpers=None)
    try:
        other = plan_best(problems_of(rings, in_ring), in_ring)
    except (InfeasibleError, UndecidedError):
        return plan
    alike = plan.sync is not None and name_routes(plan.sync.groups[0].routes).kind == "ring"
    if other.sync is None or not (alike or other.predicted.iteration_s < plan.predicted.iteration_s):
        return plan
    unproved = {"lower_bound_s": None, "witness": None}
    by_parallelism: dict[str, dict[str, Any]] = {
        DATA: {"iteration_s": other.predicted.iteration_s, **unproved},
        HYBRID: unproved,  # its sums would not go in rings, and take more of processors
    }
    outcomes = tuple(
        outcome.model_copy(update=by_parallelism.get(outcome.parallel, {})) for outcome in plan.forms
    )
    return other.model_copy(update={"forms": outcomes})


def _reason_for_ours(
    profile: Profile, options: PlanOptions, devices: Sequence[str], helpers: Sequence[str] = ()
) -> tuple[BackendReason, tuple[str, ...]] | None:
    return reason_for_ours(
        encrypt=profile.encrypted,
        pins=options.first_stage is not None or options.last_stage is not None,
        helpers=[*(options.helpers or ()), *helpers],
        devices=devices,
        addresses={node.name: node.address for node in profile.nodes},
    )


def _with_choice(
    plan: Plan, choice: BackendChoice, profile: Profile, options: PlanOptions, other: Backend | None
) -> Plan:
    """The plan with that choice, and its step over another backend (None: over none)."""
    if other is not None:
        step_s = _step_over(other, plan, profile, options)
        choice = choice.model_copy(update={"alternative": other, "alternative_s": step_s})
    return plan.model_copy(update={"backend": choice})


def _step_over(backend: Backend, plan: Plan, profile: Profile, options: PlanOptions) -> float:
    """Predicted seconds of a step of the same placement over that backend."""
    costs, _ = profile_over(profile, backend, options.only_nodes)
    [other] = problems_of(costs, replace(options, microbatches=plan.problem.microbatches))
    return predict(with_message_costs(plan.problem, other), plan).iteration_s


def _compared(workload: WorkloadRef | None, profile: Profile) -> WorkloadRef | None:
    """The workload with what the profile says of its cut."""
    if workload is None or profile.workload is None:
        return workload
    return workload.model_copy(update={"uncompared": profile.workload.comparison.doubt})
