"""From a candidate's step to a plan's record and back, whatever its parallelism and rhythm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from skyctl.errors import InputError
from skyctl.planner.candidate import Candidate, PlannedPipeline, SumGroup, layer_groups
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.evaluation import StageExecution
from skyctl.planner.rhythms import Step
from skyctl.planner.routes.route_layouts import Layout, device_routes, route_records
from skyctl.planner.step import predict_step
from skyctl.planner.step_costs import StepCosts, helpers_on
from skyctl.records.pipeline import Pipeline, PlacedStage
from skyctl.records.plan import Certificate, Plan, ProofStatus, Strategy, Unused
from skyctl.records.problem import Problem
from skyctl.records.sync import Sync, SyncGroup
from skyctl.schedule.simulation_input import SimulationInput


def make_certificate(
    value: float, bound: float | None, *, proved: bool, method: str, wall_s: float
) -> Certificate:
    """An honest one: ``optimal`` only where proved, ``bounded`` only with a bound above zero."""
    status: ProofStatus = "optimal"
    gap: float | None = 0.0
    if proved or (bound is not None and value <= bound):
        bound = value
    elif bound is None or bound <= 0:
        status, bound, gap = "feasible", None, None
    else:
        gap = value / bound - 1
        status = "optimal" if gap <= 1e-9 else "bounded"
    return Certificate(
        status=status, value_s=value, lower_bound_s=bound, gap=gap, method=method, wall_s=wall_s
    )


def make_plan(
    costs: StepCosts, strategy: Strategy, step: Step, proof: Certificate, why: Callable[[int], str]
) -> Plan:
    """The record of a step's candidate, with what is known of it, and why each device is unused that is."""
    rounds, pipelines = costs.problem.rhythm.is_rounds, step.candidate.pipelines
    used = {stage.device for placement in step.candidate.placements for stage in placement}
    used |= {d for sum_ in step.candidate.sums for d in helpers_on(sum_.routed.use, sum_.replicas)}
    return Plan(
        form="pipelines" if rounds or len(pipelines) > 1 else "grid",
        strategy=strategy,
        problem=costs.problem,
        pipelines=tuple(_pipeline_record(costs, pipeline, rounds=rounds) for pipeline in pipelines),
        unused=tuple(Unused(device=name, reason=why(d)) for d, name in enumerate(costs.ids) if d not in used),
        predicted=predict_step(costs, step),
        certificate=proof,
        sync=_sync_record(costs, step.candidate.sums),
    )


def _pipeline_record(costs: StepCosts, pipeline: PlannedPipeline, *, rounds: bool) -> Pipeline:
    columns = zip(pipeline.placement, *pipeline.execution, strict=True)
    return Pipeline(
        stages=tuple(
            PlacedStage(
                start=start,
                stop=stop,
                device=costs.ids[d],
                in_flight=in_flight,
                recompute=recompute,
                weights_behind=deferred,
            )
            for (d, start, stop), in_flight, deferred, recompute in columns
        ),
        microbatches=pipeline.microbatches,
        local_steps=pipeline.local_steps if rounds else None,
    )


def _sync_record(costs: StepCosts, groups: Sequence[SumGroup]) -> Sync | None:
    """How the groups are summed; None where nothing is."""
    if not groups:
        return None
    problem, rounds = costs.problem, costs.problem.rhythm.is_rounds
    return Sync(
        of="weights" if rounds else "gradients",
        format=problem.sync_format,
        uncompressed_steps=problem.sync_uncompressed_steps,
        chunk_bytes=min(group.chunk_bytes for group in groups),
        groups=tuple(
            SyncGroup(
                start=group.start,
                stop=group.stop,
                routes=route_records(group.routed.layout.routes(), costs.ids),
            )
            for group in groups
        ),
    )


def read_candidate(costs: StepCosts, plan: Plan) -> Candidate:
    """The candidate that a plan's record is, over the routes that it has.

    Raises:
        InputError: the plan names devices that the problem lacks, covers other layers or microbatches, has
            another kind of pipelines than the problem asks for, runs them as they can't run, or sums other
            layers than its pipelines hold together.
    """
    _require_kind(costs.problem, plan)
    pipelines = tuple(_read_pipeline(costs, pipeline, n) for n, pipeline in enumerate(plan.pipelines))
    taken = sum(pipeline.microbatches for pipeline in pipelines)
    if not costs.problem.rhythm.is_rounds and taken != costs.microbatches:
        raise InputError(
            f"the plan's pipelines take {taken} microbatches, the problem has {costs.microbatches}"
        )
    if len(pipelines) == 1:
        return Candidate(pipelines)
    if plan.sync is None:
        raise InputError("the plan has several pipelines and sums nothing of what they share")
    held = layer_groups([pipeline.placement for pipeline in pipelines])
    if [(start, stop) for start, stop, _ in held] != [
        (group.start, group.stop) for group in plan.sync.groups
    ]:
        raise InputError("the plan's sync groups are not the ranges of layers that the same devices hold")
    index = {name: d for d, name in enumerate(costs.ids)}
    groups = (
        costs.group(
            start, stop, Layout(replicas, trees=device_routes(group.routes, index)), plan.sync.chunk_bytes
        )
        for (start, stop, replicas), group in zip(held, plan.sync.groups, strict=True)
    )
    return Candidate(pipelines, tuple(groups))


def _require_kind(problem: Problem, plan: Plan) -> None:
    """Raises InputError where a plan's pipelines are not of the problem's parallelism."""
    count = len(plan.pipelines)
    if problem.rhythm.is_rounds:
        return
    if problem.parallel == "pipeline" and count != 1:
        raise InputError(f"the plan has {count} pipelines; the problem asks for one")
    if problem.parallel == "hybrid" and count < 2:
        raise InputError(
            "the plan has one pipeline; the problem asks for several", hint="plan it with --parallel pipeline"
        )
    for number, pipeline in enumerate(plan.pipelines if problem.parallel == "data" else ()):
        if len(pipeline.stages) != 1:
            raise InputError(
                f"pipeline {number} has {len(pipeline.stages)} stages; the problem asks for devices that "
                "hold all layers each",
                hint="plan it with --parallel pipeline",
            )


def _read_pipeline(costs: StepCosts, pipeline: Pipeline, number: int) -> PlannedPipeline:
    stages = pipeline.stages
    for stage in stages:
        if stage.device not in costs.ids:
            raise InputError(f"the plan names device {stage.device!r}, which is not in the problem")
        if not 1 <= stage.in_flight <= pipeline.microbatches:
            raise InputError(
                f"the stage on {stage.device} keeps {stage.in_flight} in flight, it may be 1 to "
                f"{pipeline.microbatches}"
            )
        if stage.recompute and not costs.may_recompute:
            raise InputError(
                f"pipeline {number} recomputes on {stage.device}, and the problem does not allow it"
            )
    if stages[-1].stop != costs.layers:
        raise InputError(f"the plan covers {stages[-1].stop} layers, the problem has {costs.layers}")
    if any(later.in_flight > earlier.in_flight for earlier, later in pairwise(stages)):
        raise InputError(
            "the plan's in-flight numbers grow along the pipeline; its stages would wait for ever"
        )
    return PlannedPipeline(
        tuple(StageAssignment(costs.base.index(stage.device), stage.start, stage.stop) for stage in stages),
        StageExecution(
            tuple(stage.in_flight for stage in stages),
            tuple(stage.weights_behind for stage in stages),
            tuple(stage.recompute for stage in stages),
        ),
        pipeline.microbatches,
        pipeline.local_steps or (1 if costs.problem.rhythm.is_rounds else None),
    )


def read_placement(model: CostModel, plan: Plan) -> tuple[Placement, StageExecution]:
    """The stages of a plan of one pipeline, and how they run.

    Raises:
        InputError: see ``api.predict``.
    """
    (pipeline,) = read_candidate(StepCosts(model.problem, model), plan).pipelines
    return pipeline.placement, pipeline.execution


def pipeline_simulations(plan: Plan) -> list[SimulationInput]:
    """The simulator's input for each pipeline of a plan by itself: its microbatches, and no sum.

    Raises:
        InputError: see ``api.predict``.
    """
    costs = StepCosts(plan.problem)
    return [costs.simulated(pipeline) for pipeline in read_candidate(costs, plan).pipelines]
