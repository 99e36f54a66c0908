"""When the sums of a step count: before the next one, next to it, after a round, or push by push.

Each function takes a candidate whose pipelines were played, and says what a step takes; ``step.play`` calls
the one that the problem's rhythm asks for. Times are seconds, devices indices in the problem's order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from skyctl.planner.candidate import Candidate, PlannedPipeline, SumGroup, TimeScale
from skyctl.planner.joint_sums import last_sum_s, longest_sum_s, released_s, scaled_loads
from skyctl.planner.stale_workers import CLOCKS, root_of, worker_times
from skyctl.planner.step_costs import StepCosts, keeps_start, rounds_weights
from skyctl.planner.sum_costs import message_factor
from skyctl.planner.tie_exchange import tie_exchange_s
from skyctl.records.rhythm import AUTO_STEPS
from skyctl.records.stale_prediction import StalePrediction
from skyctl.schedule.stale_simulation import simulate_stale

SUM_SHARE = 0.1
"""Of a round, what the average may take with ``auto``."""
SCALINGS, ROUNDED_SCALINGS = 2, 5
"""Passes over the weights that an average takes next to the sum: times the samples, and divided by all; in a
format that rounds also less the round's first weights, plus what was lost before, and what is lost now."""
OUTER_PASSES, MOMENTUM_PASSES = 3, 2
"""Passes over the weights that an outer step takes: the difference, the step, and a copy; with momentum also
what adds the difference to it, and it to the difference."""
MEDIAN = 0.5


class StepEnds(NamedTuple):
    """A pipeline that was played: by stage, when its last backward ends, and what its optimizer takes."""

    ends_s: Sequence[float]
    optimizer_s: Sequence[float]

    @property
    def end_s(self) -> float:
        """When the last backward ends."""
        return max(self.ends_s)

    @property
    def optimized_s(self) -> float:
        """When the last optimizer ends if each begins after its own stage's last backward."""
        return max(end + optimizer for end, optimizer in zip(self.ends_s, self.optimizer_s, strict=True))


@dataclass(frozen=True)
class Step:
    """The step of a candidate, and the seconds that it takes; of a round, all of it.

    Attributes:
        candidate: of a round, with each pipeline's local steps.
        iteration_s: of the whole.
        sync_s: from the last backward of all to the last byte of the sums, latency included; with a delay
            what the step is longer for waiting for sums; of a round, the average's part.
        exchange_s: the part of ``iteration_s`` in which a single pipeline's stages exchange the gradients of
            shared parameters.
        added_s: by device, what it computes for sums as well, where that counts as computing; with a
            parameter server also what its uneven steps take more on average.
        stale: with a parameter server.
    """

    candidate: Candidate
    iteration_s: float
    sync_s: float = 0.0
    exchange_s: float = 0.0
    added_s: Mapping[int, float] = field(default_factory=dict)
    stale: StalePrediction | None = None


def next_step(costs: StepCosts, candidate: Candidate, played: Sequence[StepEnds], scale: TimeScale) -> Step:
    """A step whose gradients are summed before the next one begins.

    Of one pipeline each stage optimizes after its own last backward; of several, all stages optimize after
    the last sum.
    """
    if not candidate.sums:
        exchange_s = tie_exchange_s(costs.base, candidate.pipelines[0].placement)
        return Step(candidate, played[0].optimized_s + exchange_s, exchange_s, exchange_s)
    groups, placements = candidate.sums, candidate.placements
    before = [_backward_s(costs, pipeline, scale) for pipeline in candidate.pipelines]
    released = released_s(placements, [ends.ends_s for ends in played], before)
    late = [size for group in groups for size in costs.late_bytes(group.start, group.stop)]
    summed_s = last_sum_s(groups, [scaled_loads(costs, group, scale) for group in groups], late, released)
    busy_s = processor_s(costs, groups)
    last_s = max(ends.end_s for ends in played)
    for placement, ends in zip(placements, played, strict=True):
        for stage, end_s in zip(placement, ends.ends_s, strict=True):
            summed_s = max(summed_s, end_s + scale.device(stage.device) * busy_s.get(stage.device, 0.0))
    waits = [group.fill_s + group.routed.use.latency_s for group in groups]
    after_s = max(last_s, summed_s) + max(waits)
    slowest_s = max(max(ends.optimizer_s) for ends in played)
    return Step(candidate, after_s + slowest_s, after_s - last_s)


def next_to_step(
    costs: StepCosts, candidate: Candidate, played: Sequence[StepEnds], scale: TimeScale
) -> Step:
    """A step next to which the sums of the step before are made."""
    busy_s = processor_s(costs, candidate.sums)
    ends: dict[int, float] = {}
    ready_s = 0.0
    for placement, pipeline_ends in zip(candidate.placements, played, strict=True):
        for stage, end_s, optimizer_s in zip(
            placement, pipeline_ends.ends_s, pipeline_ends.optimizer_s, strict=True
        ):
            d = stage.device
            if d in busy_s:
                busy_s[d] *= scale.device(d)
            ends[d] = end_s
            ready_s = max(ready_s, end_s + busy_s.get(d, 0.0) + optimizer_s)
    loads = [scaled_loads(costs, group, scale) for group in candidate.sums]
    iteration_s = max(ready_s, longest_sum_s(candidate.sums, loads, ends))
    return Step(candidate, iteration_s, iteration_s - ready_s, added_s=busy_s)


def rounds(costs: StepCosts, candidate: Candidate, played: Sequence[StepEnds], scale: TimeScale) -> Step:
    """A round: every pipeline's local steps, then the average of the weights and the outer step.

    Nothing is overlapped, and pipelines do not slow each other down.
    """
    rhythm = costs.problem.rhythm
    step_s = [
        ends.optimized_s + _local_s(costs, pipeline)
        for ends, pipeline in zip(played, candidate.pipelines, strict=True)
    ]
    sync_s = _average_s(costs, candidate, scale)
    asked = [pipeline.local_steps for pipeline in candidate.pipelines]
    steps = _local_steps(costs, step_s, sync_s) if None in asked else [count or 1 for count in asked]
    limit_s = rhythm.round_deadline_s
    work_s = []
    for count, each_s in zip(steps, step_s, strict=True):
        steps_done = count
        if limit_s is not None and count * each_s > limit_s:  # a whole number of steps is just in time
            steps_done = max(1, math.ceil(limit_s / each_s * (1 - 1e-9)))
        work_s.append(steps_done * each_s)
    slowest_s = median_slowest_s(work_s, rhythm.clients_per_round)
    pipelines = zip(candidate.pipelines, steps, strict=True)
    stepped = candidate._replace(
        pipelines=tuple(pipeline._replace(local_steps=count) for pipeline, count in pipelines)
    )
    return Step(stepped, slowest_s + sync_s + _outer_s(costs, candidate, scale), sync_s)


def pushes(costs: StepCosts, candidate: Candidate, played: Sequence[StepEnds], _scale: TimeScale) -> Step:
    """A step in the long run with a parameter server, of a play with steps as uneven as they were measured.

    Times are not scaled: the play has draws of its own.
    """
    workers = worker_times(costs, candidate, played[root_of(candidate)].optimizer_s[0])
    skipped, staleness = CLOCKS // 10, costs.problem.rhythm.staleness
    least = [worker.least_s for worker in workers]
    step_s = max(*least, simulate_stale(workers, staleness).clock_s(skipped))
    slowest = max(range(len(workers)), key=lambda number: least[number])
    devices = [costs.problem.devices[pipeline.placement[0].device] for pipeline in candidate.pipelines]
    added = {
        pipeline.placement[0].device: sum(worker.compute_s) / CLOCKS - ends.end_s - ends.optimizer_s[0]
        for pipeline, worker, ends in zip(candidate.pipelines, workers, played, strict=True)
    }
    stale = StalePrediction(
        synchronous_s=max(step_s, simulate_stale(workers, 0).clock_s(skipped)),
        bound_s=least[slowest],
        slowest=devices[slowest].id,
        unknown=tuple(device.id for device in devices if not device.step_factors),
    )
    return Step(candidate, step_s, added_s=added, stale=stale)


def processor_s(costs: StepCosts, groups: Sequence[SumGroup]) -> dict[int, float]:
    """By device, its processor's seconds for the sums of a step: adding, sending and receiving."""
    out: dict[int, float] = {}
    if not any(d.reduce_byte_s or d.message_byte_s for d in costs.problem.devices):
        return out
    factor = message_factor(costs.problem, max(group.routed.byte_s for group in groups))
    for group in groups:
        for d in group.replicas:
            byte_s = costs.processor_byte_s(group.routed.use, d, factor)
            out[d] = out.get(d, 0.0) + byte_s * group.size_bytes
    return out


def _backward_s(costs: StepCosts, pipeline: PlannedPipeline, scale: TimeScale) -> list[Sequence[float]]:
    """By stage, prefix sums of one backward on its device; recomputing stages compute forward in it."""
    out: list[Sequence[float]] = []
    for stage, recompute in zip(pipeline.placement, pipeline.execution.recompute, strict=True):
        sums: Sequence[float] = costs.base.backward_s[stage.device]
        if recompute:
            sums = [b + f for b, f in zip(sums, costs.base.forward_s[stage.device], strict=True)]
        factor = scale.device(stage.device)
        out.append(sums if factor == 1.0 else [factor * x for x in sums])
    return out


def _local_s(costs: StepCosts, pipeline: PlannedPipeline) -> float:
    """Seconds of a local step beyond its play: the sums of ties that the pipeline divides (as only one alone
    does), and FedProx's term."""
    exchange_s = tie_exchange_s(costs.base, pipeline.placement)
    if costs.problem.rhythm.prox_mu <= 0:
        return exchange_s
    return exchange_s + max(2 * costs.pass_s(*stage) for stage in pipeline.placement)


def _average_s(costs: StepCosts, candidate: Candidate, scale: TimeScale) -> float:
    """Seconds of the average: the busiest line or processor, the longest way, and what scaling takes."""
    groups, problem = candidate.sums, costs.problem
    if not groups:
        return 0.0
    lines: dict[Hashable, float] = {}
    for group in groups:
        for name, byte_s in scaled_loads(costs, group, scale):
            lines[name] = lines.get(name, 0.0) + group.size_bytes * byte_s
    held = [stage for placement in candidate.placements for stage in placement]
    busy = [
        scale.device(d)
        * math.fsum(
            group.size_bytes * costs.processor_byte_s(group.routed.use, d)
            for group in groups
            if start <= group.start < stop
        )
        for d, start, stop in held
    ]
    rounded = rounds_weights(problem)
    passes = (ROUNDED_SCALINGS if rounded else SCALINGS) + keeps_start(problem)
    scaled_s = max(passes * scale.device(stage.device) * costs.pass_s(*stage) for stage in held)
    latency_s = (1 + rounded) * max(group.routed.use.latency_s for group in groups)
    return max(*lines.values(), *busy, 0.0) + latency_s + scaled_s


def _outer_s(costs: StepCosts, candidate: Candidate, scale: TimeScale) -> float:
    """Seconds of the outer step, which every replica makes after the average."""
    rhythm = costs.problem.rhythm
    if not rhythm.has_outer_step:
        return 0.0
    passes = OUTER_PASSES + MOMENTUM_PASSES * (rhythm.outer_momentum > 0)
    held = (stage for placement in candidate.placements for stage in placement)
    return max(passes * scale.device(stage.device) * costs.pass_s(*stage) for stage in held)


def _local_steps(costs: StepCosts, step_s: Sequence[float], sync_s: float) -> Sequence[int]:
    """By pipeline, the local steps that the problem asks for; ``auto``: so many that averaging is a tenth."""
    asked = costs.problem.rhythm.local_steps
    if isinstance(asked, tuple):
        return asked
    if asked != AUTO_STEPS:
        assert isinstance(asked, int)
        return (asked,) * len(step_s)
    slowest_s = max(step_s)
    if slowest_s <= 0:
        return (1,) * len(step_s)
    level_s = max(1, math.ceil((1 / SUM_SHARE - 1) * sync_s / slowest_s)) * slowest_s
    return tuple(max(1, math.floor(level_s / each_s * (1 + 1e-9))) if each_s else 1 for each_s in step_s)


def median_slowest_s(work_s: Sequence[float], clients: int | None) -> float:
    """The slowest of those that take part, in the median round: all, or so many drawn without replacement."""
    ordered = sorted(work_s)
    count = len(ordered)
    if clients is None or clients >= count:
        return ordered[-1]
    whole = math.comb(count, clients)
    return next(s for i, s in enumerate(ordered, 1) if math.comb(i, clients) >= MEDIAN * whole)
