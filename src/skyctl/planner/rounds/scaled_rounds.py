"""A plan's round with other times of its devices and links, for the interval of its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyctl.planner.data.scaled_steps import TimeFactors
from skyctl.planner.hybrid.hybrid_model import TimeScale
from skyctl.planner.rounds.round_model import RoundModel
from skyctl.planner.rounds.round_plan import read_rounds
from skyctl.records.plan import Plan
from skyctl.schedule.simulation_input import SimulationInput


def scaled_rounds_s(
    plan: Plan, pipelines: Sequence[Iterator[SimulationInput]], factors: TimeFactors
) -> Iterator[float]:
    """The plan's round in seconds, draw by draw; its local steps, shares and routes stay as they are.

    Args:
        pipelines: by pipeline, the simulation of a local step with each draw's times.

    Raises:
        InputError: see ``api.predict``.
    """
    model = RoundModel(plan.problem)
    local, groups, steps = read_rounds(model, plan)
    links = {(link.source, link.target): link for link in plan.problem.links}
    ids = model.ids
    pairs = {pair for group in groups for pair in group.routed.use.links}
    of_link = {(a, b): factors.link(links.get((ids[a], ids[b]))) for a, b in pairs}
    of_device = [factors.layers(device) for device in plan.problem.devices]
    terms_s = [model.term_s(one) for one in local]
    for draw, drawn in enumerate(zip(*pipelines, strict=True)):
        step_s = [one.simulate().iteration_s + term_s for one, term_s in zip(drawn, terms_s, strict=True)]
        scale = TimeScale(
            device=lambda d, draw=draw: of_device[d][draw],  # type: ignore[misc]
            link=lambda pair, draw=draw: of_link[pair][draw],  # type: ignore[misc]
        )
        yield model.times(local, groups, steps, step_s, scale).round_s
