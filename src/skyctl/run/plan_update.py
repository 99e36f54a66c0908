"""Another plan for a run under way: without lost nodes, with one that came, by what was observed.

The problem stays the same but for its devices and what was seen of them: layers, microbatches, objective and
pins. The schedule stays, too, unless nothing fits with it, and so does the form: where no device that is left
holds the whole model, or those that are left can't make several pipelines, one pipeline goes on. Rounds of
common batches go on with one device alone where no two are left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from skyctl.errors import InfeasibleError, InputError, MismatchError, NodeError, UndecidedError
from skyctl.files import recent_profiles
from skyctl.jobs.training_request import TrainingRequest, send_workload
from skyctl.learning.corrections import Corrections
from skyctl.learning.observations import gather_evidence, tells_layer_times
from skyctl.learning.problem_from_profile import build_problem
from skyctl.learning.step_factors import with_observed_factors
from skyctl.planner.api import predict
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.planner.prediction_interval import with_interval
from skyctl.planner.problem_parts import shared_among, with_devices
from skyctl.planner.rounds.round_plan import plan_rounds_alone
from skyctl.planning.backend_choice import costs_of, profile_over, replanned_choice, uncarried
from skyctl.planning.parallelism_choice import PIPELINE, with_parallelism
from skyctl.planning.plan_creation import plan_best, plan_problem
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.schedule_choice import AUTO
from skyctl.records.backend import GLOO, Backend
from skyctl.records.cluster import Cluster, node_of
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import nodes_in, nodes_of
from skyctl.records.problem import Link, Problem, SharedResource
from skyctl.records.profile import Profile
from skyctl.remote.agent_session import Session
from skyctl.worker.rank_events import StepEvent

REPLAN_TIME_LIMIT_S = 5.0
"""For a plan while everybody waits."""

SLOW_FACTOR = 1.25
"""A stage that takes so many times its predicted time has become slow."""
OBSERVED_STEPS = 10
"""Steps that are looked at."""
MIN_OBSERVED_STEPS = 4
"""With fewer there is nothing to be seen."""
GAIN_COST_RATIO = 1.5
"""What is gained must be so many times what moving costs."""
MIN_GAIN = 0.03
"""A plan that is better by less is not better: predictions are no more exact than that."""
DEAD_BYTES_PER_S = 1.0
"""Of a link over which no connection came about."""
DEFAULT_RESTART_S = 30.0
"""What a restart takes where none was measured."""


def without_nodes(problem: Problem, lost: Mapping[str, str]) -> Problem:
    """The problem without the devices of those nodes.

    Args:
        lost: by node, why it can't be used.

    Raises:
        InfeasibleError: no device is left, or none that may hold a pinned stage.
    """
    left = [device for device in problem.devices if node_of(device.id) not in lost]
    ids = {device.id for device in left}
    reasons = "".join(f"\n  {name}: {why}" for name, why in lost.items())
    if not left:
        raise InfeasibleError(
            f"no device is left to train on:{reasons}", hint="bring a node back, or see skyctl check"
        )
    for name, flag in (("first_stage", "--pin-first"), ("last_stage", "--pin-last")):
        pinned: Sequence[str] | None = getattr(problem, name)
        if pinned is None:
            continue
        if not any(device in ids for device in pinned):
            raise InfeasibleError(
                f"only {', '.join(pinned)} may hold the {name.replace('_', ' ')} ({flag}), and none of them "
                f"is left:{reasons}",
                hint="bring one of them back, then resume the run",
            )
    return with_devices(problem, ids)


def replan(had: Plan, problem: Problem) -> Plan:
    """The best plan of ``problem`` by the strategy of ``had`` (for one of the user's own: the best there is).

    A backend that the user has asked for keeps out devices whose tensors it does not carry; one that was
    chosen gives way to ``skyctl`` where the plan has such. What messages cost stays as it was planned with.

    Raises:
        InfeasibleError: proved under every schedule, and for a pipeline; the message says what is short.
        UndecidedError: nothing was found in time.
    """
    if had.backend is not None and had.backend.is_asked:
        problem = _carried_by(had.backend.backend, problem)
    strategy = "optimal" if had.strategy == "assigned" else had.strategy
    options = PlanOptions(strategy=strategy, time_limit_s=REPLAN_TIME_LIMIT_S)
    try:
        best = with_interval(plan_problem(problem, options, REPLAN_TIME_LIMIT_S))
    except (InfeasibleError, UndecidedError):
        best = _replan_roomier(had, problem, replace(options, strategy="optimal", schedule=AUTO))
    ids = {device.id for device in problem.devices}
    machines = tuple(machine for machine in had.machines if machine.device in ids)
    kept = {
        "workload": had.workload,
        "machines": machines,
        "encrypted": had.encrypted,
        "backend": replanned_choice(had.backend, best),
    }
    return best.model_copy(update=kept)


def _carried_by(backend: Backend, problem: Problem) -> Problem:
    """The problem without devices whose tensors that backend does not carry."""
    ids = [device.id for device in problem.devices]
    wrong = uncarried(backend, ids)
    if len(wrong) == len(ids):
        raise InfeasibleError(
            f"--backend {backend} carries the tensors of no device that is left: {', '.join(wrong)}",
            hint="bring back a node that it serves; --backend skyctl carries those of any device",
        )
    return with_devices(problem, set(ids) - set(wrong)) if wrong else problem


def _replan_roomier(had: Plan, problem: Problem, options: PlanOptions) -> Plan:
    """A plan where none like that of ``had`` fits; raises as ``replan``."""
    roomy = problem.model_copy(update={"recompute": True})
    try:
        return plan_best([roomy], options)
    except (InfeasibleError, UndecidedError):
        if problem.rhythm.is_rounds and problem.owners is None:
            each = {pipeline.stages[0].device: pipeline.local_steps or 1 for pipeline in had.pipelines}
            return plan_rounds_alone(problem, each)
        if problem.parallel == PIPELINE:
            raise
        return plan_best([with_parallelism(roomy, PIPELINE)], options)


def replan_without(
    plan: Plan,
    there: Collection[str],
    lost: Mapping[str, str],
    slowdowns: Mapping[str, float],
    resume_hint: str | None,
    apart: tuple[str, str] | None = None,
) -> Plan:
    """The same plan while all of its nodes are there and connect, else the best one on those that are.

    Args:
        there: the run's nodes.
        lost: by node, why it was given up.
        slowdowns: as ``observed_slowdowns`` gives them.
        resume_hint: what to do once a node is back, for the error.
        apart: two nodes that could not connect with each other.

    Raises:
        InfeasibleError: nothing fits on the nodes that are there.
    """
    if apart is not None:
        plan = plan.model_copy(update={"problem": with_link_down(plan.problem, apart)})
    gone = {name: lost.get(name, "not connected") for name in nodes_of(plan.problem) if name not in there}
    if apart is None and not any(name in gone for name in nodes_in(plan)):
        return plan
    try:
        return replan(plan, without_nodes(with_observed_times(plan.problem, slowdowns), gone))
    except InfeasibleError as exc:
        names = ", ".join(gone)
        if gone:
            exc.message = f"without {names} nothing fits: {exc.message}"
        if gone and resume_hint is not None:
            exc.hint = f"bring {names} back or add a machine, then {resume_hint}"
        raise


def with_link_down(problem: Problem, apart: tuple[str, str]) -> Problem:
    """The problem with links between those nodes that no plan uses where there is another way."""
    nodes = set(apart)
    ids = [device.id for device in problem.devices]
    down = {
        (a, b): None
        for a in ids
        for b in ids
        if {node_of(a), node_of(b)} == nodes and node_of(a) != node_of(b)
    }
    kept = [link for link in problem.links if (link.source, link.target) not in down]
    dead = [Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=DEAD_BYTES_PER_S) for a, b in down]
    return problem.model_copy(update={"links": (*kept, *dead)})


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


def observed_slowdowns(plan: Plan, events: Sequence[Sequence[StepEvent]]) -> dict[str, float]:
    """By device, measured ÷ predicted of its layers' time, over the last steps; too few steps: left out.

    Args:
        events: by rank, its step events, the oldest first, without the first of an attempt. Those of rounds
            say nothing, since how much of one an owner makes is its own affair, nor do those of a run whose
            sums are made beside its layers.
    """
    if not tells_layer_times(plan):
        return {}
    planned = [
        simulation.microbatches * (layers.forward_s + layers.backward_s) + layers.optimizer_s
        for simulation in pipeline_simulations(plan)
        for layers in map(simulation.layer_times, range(len(simulation.stages)))
    ]
    factors = {}
    for rank, (stage, planned_s) in enumerate(zip(plan.placed_stages, planned, strict=True)):
        last = list(events[rank])[-OBSERVED_STEPS:] if rank < len(events) else []
        if len(last) >= MIN_OBSERVED_STEPS and planned_s > 0:
            took = [event.forward_s + event.backward_s + event.optimizer_s for event in last]
            factors[stage.device] = median(took) / planned_s
    return factors


def with_observed_times(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """The problem with the layers' times multiplied by the observed slowdowns."""
    return Corrections(factors).apply_to(problem)


def slow_devices(factors: Mapping[str, float]) -> list[str]:
    """Devices that take much longer than predicted, the slowest first."""
    return sorted((d for d, f in factors.items() if f > SLOW_FACTOR), key=lambda d: -factors[d])


def worth_moving(now_s: float, then_s: float, steps_left: int, cost_s: float) -> bool:
    """Whether the steps that are left gain clearly more than it costs to end the attempt for another plan.

    Args:
        now_s, then_s: a step's seconds by the plan under way, and by the other one.
        cost_s: seconds without training while ranks end and start.
    """
    return then_s < now_s * (1 - MIN_GAIN) and (now_s - then_s) * steps_left > GAIN_COST_RATIO * cost_s


def plan_step_s(problem: Problem, plan: Plan) -> float:
    """Seconds a step of the plan's stages would take on ``problem``, which has their devices.

    Of rounds: for the samples of a step, as ``Plan.step_s``.
    """
    return (
        predict(with_parallelism(problem, plan.problem.parallel), plan).iteration_s / plan.steps_per_iteration
    )


def same_stages(plan: Plan, other: Plan) -> bool:
    """Whether both put the same layers on the same devices in the same way."""
    return plan.pipelines == other.pipelines and plan.problem.schedule == other.problem.schedule


# What is known of a node that comes to a run under way: from a plan, from a profile, or measured now.


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
    """What plans of the run's form reckon with, and nobody knows of a node's devices; None: nothing.

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
