"""Another plan for a run under way: without lost nodes, and by what was observed.

The problem stays the same but for its devices and what was seen of them: layers, microbatches, objective and
pins. The schedule stays, too, unless nothing fits with it, and so does the form: where no device that is left
holds the whole model, or those that are left can't make several pipelines, one pipeline goes on. Rounds of
common batches go on with one device alone where no two are left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.learning.corrections import Corrections
from skyctl.learning.observations import tells_layer_times
from skyctl.planner.api import predict
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.planner.prediction_interval import with_interval
from skyctl.planner.problem_parts import with_devices
from skyctl.planner.rounds.round_plan import plan_rounds_alone
from skyctl.planning.backend_choice import replanned_choice, uncarried
from skyctl.planning.parallelism_choice import PIPELINE, with_parallelism
from skyctl.planning.plan_creation import plan_best, plan_problem
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.schedule_choice import AUTO
from skyctl.records.backend import Backend
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.plan_nodes import nodes_in, nodes_of
from skyctl.records.problem import Link, Problem
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
"""The gain must be so many times what moving costs."""
MIN_GAIN = 0.03
"""A plan that is better by less is not better: predictions are no more exact than that."""
DEAD_BYTES_PER_S = 1.0
"""Of a link over which no connection came about."""
DEFAULT_RESTART_S = 30.0
"""The seconds that a restart takes if none was measured."""


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
    chosen gives way to ``skyctl`` where the plan has such. The costs of messages stay as planned.

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
