"""Plans whose runs take turns on the same devices: their steps then, and the room that each needs."""

from __future__ import annotations

from collections.abc import Mapping

from skyctl.planner.plan_record import read_candidate
from skyctl.planner.step_costs import StepCosts
from skyctl.records.plan import Plan
from skyctl.turns.memory_admission import MemoryNeed
from skyctl.turns.turn_simulation import PlacedPipeline, SharedRun


def shared_run(plan: Plan, steps: int, *, priority: int = 0) -> SharedRun | None:
    """The plan's run as ``turns.turn_simulation`` plays it beside others. Sums take as long as they do alone.

    None: updates are late, stale or made in rounds, and a step ends by other rules.

    Args:
        steps: how many it makes.
        priority: the highest goes first, under that policy.
    """
    if not plan.problem.rhythm.is_synchronous:
        return None
    costs = StepCosts(plan.problem)
    candidate = read_candidate(costs, plan)
    pipelines = tuple(
        PlacedPipeline(
            costs.simulated(pipeline), tuple(costs.ids[stage.device] for stage in pipeline.placement)
        )
        for pipeline in candidate.pipelines
    )
    alone_s = max(placed.pipeline.simulate().iteration_s for placed in pipelines)
    return SharedRun(pipelines, steps, max(0.0, plan.predicted.iteration_s - alone_s), priority)


def memory_needs(plan: Plan) -> Mapping[str, MemoryNeed]:
    """By device of the plan, what it keeps between two actions, and what it needs in one of them besides.

    The second is the largest workspace of its layers: activations wait for their backward, and are kept.
    """
    layers = {stage.device: plan.problem.layers[stage.start : stage.stop] for stage in plan.placed_stages}
    needs = {}
    for replica in plan.predicted.replicas:
        workspaces = (layer.workspace_bytes for layer in layers.get(replica.device, ()))
        workspace = min(max(workspaces, default=0.0), replica.memory_bytes)
        needs[replica.device] = MemoryNeed(replica.memory_bytes - workspace, workspace)
    return needs
