"""The time of one step of a candidate, whatever its parallelism and rhythm: ``play``.

Pipelines are played by themselves, then side by side where their messages share resources. When the sums of
what they share count is the rhythm's: before the next step, next to it, after a round, or push by push
(``rhythms``). The model is the contract's (``docs/contract.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyctl.planner.candidate import AS_MEASURED, Candidate, PlannedPipeline, TimeScale, arriving_edges
from skyctl.planner.evaluation import bottleneck_s
from skyctl.planner.rhythms import Step, StepEnds, next_step, next_to_step, pushes, rounds
from skyctl.planner.step_costs import StepCosts
from skyctl.records.plan import Prediction, ReplicaPrediction
from skyctl.records.problem import Problem
from skyctl.schedule.joint_simulation import ends_together
from skyctl.schedule.simulation_input import SimulationInput

RhythmStep = Callable[[StepCosts, Candidate, Sequence[StepEnds], TimeScale], Step]


def rhythm_of(problem: Problem, candidate: Candidate) -> RhythmStep:
    """When the sums of a candidate count."""
    if problem.rhythm.is_rounds:
        return rounds
    if not candidate.sums:
        return next_step
    if problem.rhythm.is_stale:
        return pushes
    return next_to_step if problem.rhythm.delay else next_step


def play(
    costs: StepCosts,
    candidate: Candidate,
    simulated: Sequence[SimulationInput] | None = None,
    scale: TimeScale = AS_MEASURED,
) -> Step:
    """The step of a candidate, whether it fits in memory or not.

    Args:
        simulated: by pipeline, what the simulator is given; None: the problem's times.
        scale: of the sums' times; those of the pipelines are in ``simulated``.
    """
    if simulated is None:
        alone = [play_alone(costs, pipeline) for pipeline in candidate.pipelines]
    else:
        alone = [
            StepEnds(simulation.simulate().ended_s, [stage.optimizer_s for stage in simulation.stages])
            for simulation in simulated
        ]
    return play_together(costs, candidate, alone, simulated, scale)


def play_alone(costs: StepCosts, pipeline: PlannedPipeline) -> StepEnds:
    """When the stages of a pipeline end that runs by itself."""
    optimizer_s = costs.costs(pipeline.microbatches).optimizer_s.of(pipeline.placement)
    return StepEnds(costs.ends_s(pipeline), optimizer_s)


def play_together(
    costs: StepCosts,
    candidate: Candidate,
    alone: Sequence[StepEnds],
    simulated: Sequence[SimulationInput] | None = None,
    scale: TimeScale = AS_MEASURED,
) -> Step:
    """``play`` of pipelines that were played by themselves.

    Side by side, their messages wait for each other on shared resources; those of rounds do not.
    """
    if costs.problem.shared and len(alone) > 1 and not costs.problem.rhythm.is_rounds:
        simulated = simulated or [costs.simulated(pipeline) for pipeline in candidate.pipelines]
        ends = ends_together(simulated, [pipeline_ends.ends_s for pipeline_ends in alone])
        alone = [
            pipeline_ends._replace(ends_s=ends_s) for pipeline_ends, ends_s in zip(alone, ends, strict=True)
        ]
    return rhythm_of(costs.problem, candidate)(costs, candidate, alone, scale)


def predict_step(costs: StepCosts, step: Step) -> Prediction:
    """A step as a plan's record has it: what each device computes, waits and needs."""
    children = arriving_edges(step.candidate.sums)
    replicas = []
    slowest_s = 0.0
    for pipeline in step.candidate.pipelines:
        model = costs.costs(pipeline.microbatches)
        times = costs.simulated(pipeline).stages
        slowest_s = max(slowest_s, bottleneck_s(model, pipeline.placement, pipeline.execution))
        columns = zip(pipeline.placement, times, *pipeline.execution, strict=True)
        for stage, each, in_flight, deferred, recompute in columns:
            d = stage.device
            busy_s = pipeline.microbatches * (each.forward_s + each.backward_s) + each.optimizer_s
            busy_s = (pipeline.local_steps or 1) * busy_s + step.added_s.get(d, 0.0)
            need = model.device_bytes(stage, in_flight, deferred, recompute=recompute)
            replicas.append(
                ReplicaPrediction(
                    device=costs.ids[d],
                    compute_s=busy_s,
                    idle_s=max(0.0, step.iteration_s - step.exchange_s - busy_s),
                    memory_bytes=need + costs.edge_bytes(children.get(d, 0)),
                )
            )
    return Prediction(
        iteration_s=step.iteration_s,
        bottleneck_s=slowest_s,
        sync_s=max(0.0, step.sync_s),
        replicas=tuple(replicas),
        stale=step.stale,
    )
