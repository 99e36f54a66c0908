"""A plan of any parallelism and rhythm, played with other times of its devices and links, draw by draw.

Also what a step without staleness takes in the long run, with steps as uneven as runs have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from skyctl.planner.candidate import Candidate, TimeScale
from skyctl.planner.cost_model import Placement
from skyctl.planner.plan_record import read_candidate
from skyctl.planner.stale_workers import CLOCKS, drawn_factors
from skyctl.planner.step import play
from skyctl.planner.step_costs import StepCosts
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Link
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

MOST_ACTIONS = 2_000
"""Stages × microbatches of one pipeline that are simulated for a draw: of longer steps the first part, with
the same depths, and less of the optimizer. Their beginning and end then weigh a little more than they
should."""
DRAWN_PIPELINES = 400
"""Steps that are drawn where each has to be simulated."""


class TimeFactors(NamedTuple):
    """By draw, what times are multiplied by.

    Attributes:
        layers: of a device's layers, its optimizer, and its processor's work on gradients.
        overhead: of what a device does besides its layers.
        link: of a link's seconds; None: no link is given.
    """

    layers: Callable[[Device], Sequence[float]]
    overhead: Callable[[Device], Sequence[float]]
    link: Callable[[Link | None], Sequence[float]]


def drawn_ratios(plan: Plan, factors: TimeFactors, draws: int) -> list[float]:
    """By draw, the plan's step (or round) ÷ the predicted one, which is more than 0 s.

    Cuts, shares, routes and local steps stay as they are. Not for a plan with a parameter server.

    Args:
        factors: each of ``draws`` numbers.

    Raises:
        InputError: see ``api.predict``.
    """
    costs = StepCosts(plan.problem)
    candidate = read_candidate(costs, plan)
    whole = [costs.simulated(pipeline) for pipeline in candidate.pipelines]
    plays = [_shortened(whole[0])] if len(whole) == 1 and not plan.problem.rhythm.is_rounds else whole
    expected_s = play(costs, candidate, plays).iteration_s
    drawn = _Draws(plan, costs.ids, factors)
    columns = [
        drawn.of_pipeline(simulated, pipeline.placement, draws)
        for simulated, pipeline in zip(plays, candidate.pipelines, strict=True)
    ]
    scales = drawn.of_sums(candidate, draws)
    return [
        play(costs, candidate, drawn_play, scale).iteration_s / expected_s
        for drawn_play, scale in zip(zip(*columns, strict=True), scales, strict=True)
    ]


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
    by_device = {stage.device: tuple(factors.get(stage.device, ())) for stage in plan.placed_stages}
    if plan.predicted.stale is not None or step_s <= 0 or not any(by_device.values()):
        return step_s
    draws = CLOCKS if plan.problem.parallel == "data" else DRAWN_PIPELINES

    def drawn(device: Device) -> Sequence[float]:
        own = by_device.get(device.id, ())
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


class _Draws:
    """A plan's devices and links with each draw's times."""

    def __init__(self, plan: Plan, ids: Sequence[str], factors: TimeFactors) -> None:
        self._devices, self._ids, self._factors = plan.problem.devices, ids, factors
        self._links = {(link.source, link.target): link for link in plan.problem.links}
        self._layers: dict[int, Sequence[float]] = {}

    def _of_device(self, device: int) -> Sequence[float]:
        if device not in self._layers:
            self._layers[device] = self._factors.layers(self._devices[device])
        return self._layers[device]

    def _of_link(self, source: int, target: int) -> Sequence[float]:
        return self._factors.link(self._links.get((self._ids[source], self._ids[target])))

    def of_pipeline(
        self, play: SimulationInput, placement: Placement, draws: int
    ) -> Iterator[SimulationInput]:
        """By draw, what the simulator is given for a pipeline."""
        layers = [self._of_device(stage.device) for stage in placement]
        overhead = [self._factors.overhead(self._devices[stage.device]) for stage in placement]
        ahead = [self._of_link(a.device, b.device) for a, b in pairwise(placement)]
        back = [self._of_link(b.device, a.device) for a, b in pairwise(placement)]
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

    def of_sums(self, candidate: Candidate, draws: int) -> Iterator[TimeScale]:
        """By draw, what the times of sums are multiplied by."""
        pairs = {pair for group in candidate.sums for pair in group.routed.use.links}
        of_link = {pair: self._of_link(*pair) for pair in pairs}
        for draw in range(draws):
            yield TimeScale(
                device=lambda d, draw=draw: self._of_device(d)[draw],  # type: ignore[misc]
                link=lambda pair, draw=draw: of_link[pair][draw],  # type: ignore[misc]
            )


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
