"""What the simulator is given for each pipeline of a plan alone: its share of microbatches, and no sum."""

from __future__ import annotations

from dataclasses import replace

from skyctl.planner.cost_model import CostModel, StageAssignment
from skyctl.planner.evaluation import StageExecution, simulation_input, simulation_input_of
from skyctl.records.plan import Plan
from skyctl.schedule.simulation_input import SimulationInput


def pipeline_simulations(plan: Plan) -> list[SimulationInput]:
    """By pipeline, the times of its stages and messages as the plan's problem has them.

    Raises:
        InputError: see ``api.predict``.
    """
    if len(plan.pipelines) == 1:
        return [simulation_input_of(plan)]
    model = CostModel(plan.problem)
    device = {one.id: number for number, one in enumerate(plan.problem.devices)}
    found = []
    for pipeline in plan.pipelines:
        placement = tuple(StageAssignment(device[s.device], s.start, s.stop) for s in pipeline.stages)
        execution = StageExecution(
            tuple(stage.in_flight for stage in pipeline.stages),
            tuple(stage.weights_behind for stage in pipeline.stages),
            tuple(stage.recompute for stage in pipeline.stages),
        )
        simulated = simulation_input(model, placement, execution)
        found.append(replace(simulated, microbatches=pipeline.microbatches))
    return found
