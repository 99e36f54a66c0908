"""How sure a predicted step is: the plan is simulated with figures drawn at random from where they may lie.

Every device's layer times, its overhead and every link's messages are multiplied by a factor of their own,
and all of computing by one that they have in common (a machine is not the same while it trains as while it
was probed). Factors are log-normal, with the uncertainties that the problem has. What a pipeline makes of
them is the simulator's to say: the slowest of several stages is slower than the mean, so most intervals
reach further up than down.

The draws are a Latin hypercube (McKay, Beckman and Conover 1979), and each figure's depend on its name
alone: the same plan has the same interval, and two plans of one problem are compared under the same draws,
in which what they have in common is no difference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

from skyctl.planner.evaluation import simulation_input_of
from skyctl.planner.pipeline_simulations import pipeline_simulations
from skyctl.records.interval import INTERVAL_SHARE, Interval
from skyctl.records.measurement import quantile
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Link, Problem
from skyctl.schedule.simulation import BoundaryTimes, MessageTimes, StageTimes
from skyctl.schedule.simulation_input import SimulationInput

if TYPE_CHECKING:
    from skyctl.planner.data.scaled_steps import TimeFactors

DRAWS = 100
COMMON_UNCERTAINTY = 0.04
"""Of all computing together: what the model of time leaves out (docs/decisions.md)."""
MOST_ACTIONS = 2_000
"""Stages × microbatches that are simulated for a draw: of longer steps the first part, with the same depths,
and less of the optimizer. Their beginning and end then weigh a little more than they should."""


def with_interval(plan: Plan) -> Plan:
    """The plan with its predicted step's interval; as it is where its problem has no uncertainties."""
    drawn = _drawn_ratios(plan)
    if drawn is None:
        return plan
    step_s = plan.predicted.iteration_s
    low, high = _bounds(drawn)
    interval = Interval(low_s=min(1.0, low) * step_s, high_s=max(1.0, high) * step_s)
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"interval": interval})})


def ratio_interval(slower: Plan, faster: Plan) -> tuple[float, float] | None:
    """Where the step of ``slower`` ÷ that of ``faster`` lies, with the same probability as an ``Interval``.

    None where either's problem has no uncertainties. Where it holds 1, neither can be called faster.
    """
    drawn = _drawn_ratios(slower), _drawn_ratios(faster)
    if drawn[0] is None or drawn[1] is None:
        return None
    expected = slower.predicted.iteration_s / faster.predicted.iteration_s
    low, high = _bounds([expected * a / b for a, b in zip(drawn[0], drawn[1], strict=True)])
    return min(low, expected), max(high, expected)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    tail = (1 - INTERVAL_SHARE) / 2
    return quantile(values, tail), quantile(values, 1 - tail)


def _drawn_ratios(plan: Plan) -> list[float] | None:
    """By draw, the plan's step ÷ the one without uncertainties; None where there are none."""
    known = {device.id: device for device in plan.problem.devices}
    devices = [known[stage.device] for stage in plan.placed_stages]
    if plan.predicted.stale is not None:  # of a play with draws of its own
        return None
    if plan.predicted.iteration_s <= 0 or all(device.time_uncertainty is None for device in devices):
        return None
    if plan.problem.rhythm.is_rounds:
        return _round_ratios(plan)
    if plan.problem.parallel == "data":
        return _data_ratios(plan)
    if plan.problem.parallel == "hybrid":
        return _hybrid_ratios(plan)
    play = _shortened(simulation_input_of(plan))
    expected_s = play.simulate().iteration_s
    return [one.simulate().iteration_s / expected_s for one in _draws_of(plan.problem, play, devices)]


def _draws_of(
    problem: Problem, play: SimulationInput, devices: Sequence[Device]
) -> Iterator[SimulationInput]:
    """The simulation of a pipeline over these devices with each draw's times."""
    links = {(link.source, link.target): link for link in problem.links}
    pairs = list(pairwise(devices))
    ahead = [links.get((a.id, b.id)) for a, b in pairs]
    back = [links.get((b.id, a.id)) for a, b in pairs]
    return _draws(play, devices, ahead, back)


def _data_ratios(plan: Plan) -> list[float]:
    """The same of a plan whose devices hold all layers each: its shares with each draw's times."""
    from skyctl.planner.data.scaled_steps import scaled_steps_s

    expected_s = plan.predicted.iteration_s
    return [step_s / expected_s for step_s in scaled_steps_s(plan, _time_factors(), DRAWS)]


def _hybrid_ratios(plan: Plan) -> list[float]:
    """The same of a plan of several pipelines: each with each draw's times, and the sums of all."""
    from skyctl.planner.hybrid.scaled_hybrids import scaled_steps_s

    expected_s = plan.predicted.iteration_s
    steps_s = scaled_steps_s(plan, _pipeline_draws(plan), _time_factors())
    return [step_s / expected_s for step_s in steps_s]


def _round_ratios(plan: Plan) -> list[float]:
    """The same of a plan of rounds: each pipeline with each draw's times, and the average of all."""
    from skyctl.planner.rounds.scaled_rounds import scaled_rounds_s

    expected_s = plan.predicted.iteration_s
    rounds_s = scaled_rounds_s(plan, _pipeline_draws(plan), _time_factors())
    return [round_s / expected_s for round_s in rounds_s]


def _pipeline_draws(plan: Plan) -> list[Iterator[SimulationInput]]:
    """By pipeline, its simulation with each draw's times."""
    known = {device.id: device for device in plan.problem.devices}
    return [
        _draws_of(plan.problem, play, [known[stage.device] for stage in pipeline.stages])
        for play, pipeline in zip(pipeline_simulations(plan), plan.pipelines, strict=True)
    ]


def _time_factors() -> TimeFactors:
    from skyctl.planner.data.scaled_steps import TimeFactors

    common = _factors("all computing", COMMON_UNCERTAINTY)

    def with_common(name: str, uncertainty: float | None) -> tuple[float, ...]:
        own = _factors(name, uncertainty)
        return tuple(a * b for a, b in zip(common, own, strict=True))

    return TimeFactors(
        layers=lambda device: with_common(f"layers of {device.id}", device.time_uncertainty),
        overhead=lambda device: with_common(f"overhead of {device.id}", device.overhead_uncertainty),
        link=_link_factors,
    )


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


def _draws(
    play: SimulationInput,
    devices: Sequence[Device],
    ahead: Sequence[Link | None],
    back: Sequence[Link | None],
) -> Iterator[SimulationInput]:
    """The plan's simulation with each draw's times."""
    common = _factors("all computing", COMMON_UNCERTAINTY)
    layers = [_factors(f"layers of {one.id}", one.time_uncertainty) for one in devices]
    overhead = [_factors(f"overhead of {one.id}", one.overhead_uncertainty) for one in devices]
    messages = [[_link_factors(link) for link in links] for links in (ahead, back)]
    for draw in range(DRAWS):
        stages = tuple(
            _scaled_stage(play, stage, common[draw] * own[draw], common[draw] * more[draw])
            for stage, (own, more) in enumerate(zip(layers, overhead, strict=True))
        )
        boundaries = tuple(
            BoundaryTimes(
                _scaled_message(boundary.forward, to[draw]), _scaled_message(boundary.backward, fro[draw])
            )
            for boundary, to, fro in zip(play.boundaries, *messages, strict=True)
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


def _link_factors(link: Link | None) -> tuple[float, ...]:
    known = None if link is None else link.uncertainty
    return _factors(f"{link.source} → {link.target}" if link is not None else "", known)


@lru_cache(maxsize=4096)
def _standard_draws(name: str) -> tuple[float, ...]:
    """A standard normal's draws, one from each of ``DRAWS`` equally likely parts, in the name's own order."""
    points = [NormalDist().inv_cdf((i + 0.5) / DRAWS) for i in range(DRAWS)]
    random.Random(name).shuffle(points)  # noqa: S311 - draws, no secrets
    return tuple(points)


def _factors(name: str, uncertainty: float | None) -> tuple[float, ...]:
    """By draw, what the figures of that name are multiplied by; their median is 1."""
    if not uncertainty:
        return (1.0,) * DRAWS
    # a log-normal's own parameter: its relative standard deviation is then the uncertainty
    spread = math.sqrt(math.log1p(uncertainty**2))
    return tuple(math.exp(spread * z) for z in _standard_draws(name))
