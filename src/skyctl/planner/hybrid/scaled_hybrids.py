"""A plan's step with other times of its devices and links, for the interval of its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyctl.planner.data.scaled_steps import TimeFactors
from skyctl.planner.hybrid.hybrid_model import HybridModel, TimeScale
from skyctl.planner.hybrid.hybrid_plan import read_step
from skyctl.records.plan import Plan
from skyctl.schedule.joint_simulation import ends_together
from skyctl.schedule.simulation_input import SimulationInput


def scaled_steps_s(
    plan: Plan, pipelines: Sequence[Iterator[SimulationInput]], factors: TimeFactors
) -> Iterator[float]:
    """The plan's step in seconds, draw by draw; its cuts, shares and routes stay as they are.

    Args:
        pipelines: by pipeline, its simulation with each draw's times.

    Raises:
        InputError: see ``api.predict``.
    """
    model = HybridModel(plan.problem)
    step = read_step(model, plan)
    links = {(link.source, link.target): link for link in plan.problem.links}
    ids = model.ids
    pairs = {pair for group in step.groups for pair in group.routed.use.links}
    of_link = {(a, b): factors.link(links.get((ids[a], ids[b]))) for a, b in pairs}
    of_device = [factors.layers(device) for device in plan.problem.devices]
    for draw, drawn in enumerate(zip(*pipelines, strict=True)):
        found = ends_together(drawn, [scaled.simulate().ended_s for scaled in drawn])
        plays = [
            play._replace(ends_s=ends, optimizer_s=tuple(stage.optimizer_s for stage in scaled.stages))
            for play, scaled, ends in zip(step.plays, drawn, found, strict=True)
        ]
        scale = TimeScale(
            device=lambda d, draw=draw: of_device[d][draw],  # type: ignore[misc]
            link=lambda pair, draw=draw: of_link[pair][draw],  # type: ignore[misc]
        )
        yield model.step_of(step.candidate, plays, step.groups, scale).iteration_s
