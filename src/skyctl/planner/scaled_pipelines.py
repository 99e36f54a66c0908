"""A step of several pipelines, or a round, predicted again with other times of devices and links, by draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from skyctl.planner.data.scaled_steps import TimeFactors
from skyctl.planner.hybrid.hybrid_model import HybridModel, TimeScale
from skyctl.planner.hybrid.hybrid_plan import read_step
from skyctl.planner.rounds.round_model import RoundModel
from skyctl.planner.rounds.round_plan import read_rounds
from skyctl.records.plan import Plan
from skyctl.schedule.joint_simulation import ends_together
from skyctl.schedule.simulation_input import SimulationInput

Draws = Iterable[tuple[SimulationInput, ...]]
"""By draw, each pipeline's simulation with that draw's times; of a round, of a local step."""


def scaled_hybrids_s(plan: Plan, draws: Draws, factors: TimeFactors) -> Iterator[float]:
    """The plan's step in seconds, draw by draw; its cuts, shares and routes stay as they are.

    Raises:
        InputError: see ``api.predict``.
    """
    model = HybridModel(plan.problem)
    step = read_step(model, plan)
    pairs = {pair for group in step.groups for pair in group.routed.use.links}
    scales = _time_scales(plan, model.ids, pairs, factors)
    for drawn, scale in zip(draws, scales, strict=True):
        found = ends_together(drawn, [scaled.simulate().ended_s for scaled in drawn])
        plays = [
            play._replace(ends_s=ends, optimizer_s=tuple(stage.optimizer_s for stage in scaled.stages))
            for play, scaled, ends in zip(step.plays, drawn, found, strict=True)
        ]
        yield model.step_of(step.candidate, plays, step.groups, scale).iteration_s


def scaled_rounds_s(plan: Plan, draws: Draws, factors: TimeFactors) -> Iterator[float]:
    """The plan's round in seconds, draw by draw; its local steps, shares and routes stay as they are.

    Raises:
        InputError: see ``api.predict``.
    """
    model = RoundModel(plan.problem)
    local, groups, steps = read_rounds(model, plan)
    pairs = {pair for group in groups for pair in group.routed.use.links}
    scales = _time_scales(plan, model.ids, pairs, factors)
    added_s = [model.added_s(one) for one in local]
    for drawn, scale in zip(draws, scales, strict=True):
        step_s = [one.simulate().iteration_s + more_s for one, more_s in zip(drawn, added_s, strict=True)]
        yield model.times(local, groups, steps, step_s, scale).round_s


def _time_scales(
    plan: Plan, ids: Sequence[str], pairs: Iterable[tuple[int, int]], factors: TimeFactors
) -> Iterator[TimeScale]:
    """By draw, what devices' and links' times are multiplied by; as many draws as each factor has numbers.

    Args:
        ids: the devices' names, by number.
        pairs: (source, target), by number, of the links that anything is summed over.
    """
    links = {(link.source, link.target): link for link in plan.problem.links}
    of_link = {(a, b): factors.link(links.get((ids[a], ids[b]))) for a, b in pairs}
    of_device = [factors.layers(device) for device in plan.problem.devices]
    for draw in range(len(of_device[0])):
        yield TimeScale(
            device=lambda d, draw=draw: of_device[d][draw],  # type: ignore[misc]
            link=lambda pair, draw=draw: of_link[pair][draw],  # type: ignore[misc]
        )
