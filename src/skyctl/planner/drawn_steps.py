"""A plan of any form and rhythm, played with other times of its devices and links, draw by draw.

Also what a step without staleness takes in the long run, with steps as uneven as runs have shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from skyctl.planner.data.scaled_steps import TimeFactors, scaled_steps_s
from skyctl.planner.data.stale_plan import CLOCKS, drawn_factors
from skyctl.planner.evaluation import pipeline_simulations, simulation_input_of
from skyctl.planner.scaled_pipelines import scaled_hybrids_s, scaled_rounds_s
from skyctl.records.plan import Plan
from skyctl.records.problem import Device
from skyctl.schedule.simulation import BoundaryTimes, MessageTimes, StageTimes
from skyctl.schedule.simulation_input import SimulationInput

MOST_ACTIONS = 2_000
"""Stages × microbatches that are simulated for a draw: of longer steps the first part, with the same depths,
and less of the optimizer. Their beginning and end then weigh a little more than they should."""
DRAWN_PIPELINES = 400
"""Steps that are drawn where each has to be simulated."""


def drawn_ratios(plan: Plan, factors: TimeFactors, draws: int) -> list[float]:
    """By draw, the plan's step (or round) ÷ the predicted one, which is more than 0 s.

    Cuts, shares, routes and local steps stay as they are. Not for a plan with a parameter server.

    Args:
        factors: each of ``draws`` numbers.

    Raises:
        InputError: see ``api.predict``.
    """
    problem, expected_s = plan.problem, plan.predicted.iteration_s
    known = {device.id: device for device in problem.devices}

    def drawn(play: SimulationInput, names: Sequence[str]) -> Iterator[SimulationInput]:
        return _draws_of(plan, play, [known[name] for name in names], factors, draws)

    if problem.rhythm.is_rounds or problem.parallel == "hybrid":
        pipelines = [
            drawn(play, [stage.device for stage in pipeline.stages])
            for play, pipeline in zip(pipeline_simulations(plan), plan.pipelines, strict=True)
        ]
        scaled = scaled_rounds_s if problem.rhythm.is_rounds else scaled_hybrids_s
        steps_s = scaled(plan, zip(*pipelines, strict=True), factors)
    elif problem.parallel == "data":
        steps_s = scaled_steps_s(plan, factors, draws)
    else:
        play = _shortened(simulation_input_of(plan))
        expected_s = play.simulate().iteration_s
        names = [stage.device for stage in plan.placed_stages]
        steps_s = (one.simulate().iteration_s for one in drawn(play, names))
    return [step_s / expected_s for step_s in steps_s]


def long_run_step_s(plan: Plan, factors: Mapping[str, Sequence[float]]) -> float:
    """Seconds for the samples of a step on average, comparable with a parameter server's predicted step.

    Each step waits for the slowest of all. A device's factors are drawn as for the play of a parameter
    server's plan, and multiply all that it computes in a step.

    Args:
        plan: of any rhythm; with a parameter server its prediction is of the long run already.
        factors: by device, its ``step_factors``; a device that is left out has even steps.

    Raises:
        InputError: see ``api.predict``.
    """
    step_s = plan.step_s
    known = {stage.device: tuple(factors.get(stage.device, ())) for stage in plan.placed_stages}
    if plan.predicted.stale is not None or step_s <= 0 or not any(known.values()):
        return step_s
    draws = CLOCKS if plan.problem.parallel == "data" else DRAWN_PIPELINES

    def drawn(device: Device) -> Sequence[float]:
        own = known.get(device.id, ())
        return drawn_factors(device.model_copy(update={"step_factors": own}), draws)

    even = (1.0,) * draws
    return step_s * fmean(drawn_ratios(plan, TimeFactors(drawn, drawn, lambda _link: even), draws))


def _shortened(play: SimulationInput) -> SimulationInput:
    """At most ``MOST_ACTIONS`` of the step, but never less than fills the pipeline four times."""
    stages = len(play.stages)
    count = max(MOST_ACTIONS // stages, 4 * stages)
    if play.microbatches <= count:
        return play
    share = count / play.microbatches
    return replace(
        play,
        microbatches=count,
        in_flight=tuple(min(k, count) for k in play.in_flight),
        deferred_weights=tuple(min(k, count) for k in play.deferred_weights),
        stages=tuple(replace(stage, optimizer_s=share * stage.optimizer_s) for stage in play.stages),
    )


def _draws_of(
    plan: Plan, play: SimulationInput, devices: Sequence[Device], factors: TimeFactors, draws: int
) -> Iterator[SimulationInput]:
    """The simulation of a pipeline over these devices with each draw's times."""
    links = {(link.source, link.target): link for link in plan.problem.links}
    layers = [factors.layers(device) for device in devices]
    overhead = [factors.overhead(device) for device in devices]
    pairs = [(a.id, b.id) for a, b in pairwise(devices)]
    ahead = [factors.link(links.get(pair)) for pair in pairs]
    back = [factors.link(links.get(pair[::-1])) for pair in pairs]
    for draw in range(draws):
        stages = tuple(
            _scaled_stage(play, stage, own[draw], more[draw])
            for stage, (own, more) in enumerate(zip(layers, overhead, strict=True))
        )
        boundaries = tuple(
            BoundaryTimes(
                _scaled_message(boundary.forward, to[draw]), _scaled_message(boundary.backward, fro[draw])
            )
            for boundary, to, fro in zip(play.boundaries, ahead, back, strict=True)
        )
        yield replace(play, stages=stages, boundaries=boundaries)


def _scaled_stage(play: SimulationInput, stage: int, layers: float, overhead: float) -> StageTimes:
    times, overhead_s = play.layer_times(stage), play.stage_overhead_s(stage) * overhead
    return StageTimes(
        times.forward_s * layers + overhead_s,
        times.backward_s * layers + overhead_s,
        times.optimizer_s * layers,
        times.weight_s * layers,
    )


def _scaled_message(times: MessageTimes, factor: float) -> MessageTimes:
    shared = tuple((name, seconds * factor) for name, seconds in times.shared)
    return MessageTimes(times.link_s * factor, times.latency_s, shared)
