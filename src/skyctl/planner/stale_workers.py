"""The workers of a parameter server: what their clocks take, with steps as uneven as they were measured."""

from __future__ import annotations

import random
from collections.abc import Sequence

from skyctl.planner.candidate import Candidate
from skyctl.planner.step_costs import StepCosts
from skyctl.records.problem import Device
from skyctl.schedule.stale_simulation import WorkerTimes
from skyctl.schedule.step_times import MessageTimes

CLOCKS = 4_000
"""Of a play; the first tenth is not counted."""


def root_of(candidate: Candidate) -> int:
    """The place among the pipelines of the one whose device holds the weights."""
    children = candidate.sums[0].routed.use.children
    devices = [pipeline.placement[0].device for pipeline in candidate.pipelines]
    return max(range(len(devices)), key=lambda n: children.get(devices[n], 0))


def worker_times(costs: StepCosts, candidate: Candidate, apply_s: float) -> list[WorkerTimes]:
    """By pipeline, what its clocks take: with draws of their own, the same for the same device.

    Args:
        apply_s: seconds of the root's optimizer.
    """
    root = candidate.pipelines[root_of(candidate)].placement[0].device
    size = costs.total_bytes
    passing_s = 2 * size * costs.problem.devices[root].message_byte_s
    workers = []
    for pipeline in candidate.pipelines:
        d, times = pipeline.placement[0].device, costs.simulated(pipeline).stages[0]
        clock_s = pipeline.microbatches * (times.forward_s + times.backward_s)
        compute_s = [clock_s * x for x in drawn_factors(costs.problem.devices[d], CLOCKS)]
        if d == root:
            workers.append(WorkerTimes(compute_s, apply_s=apply_s))
            continue
        push, pull = (_message(costs, pair, size) for pair in ((d, root), (root, d)))
        workers.append(WorkerTimes(compute_s, push, pull, apply_s + passing_s))
    return workers


def drawn_factors(device: Device, count: int) -> Sequence[float]:
    """So many of a device's factors, drawn by its name; their mean is that of the factors themselves."""
    factors = device.step_factors
    if not factors:
        return [1.0] * count
    drawn = random.Random(device.id).choices(factors, k=count)  # noqa: S311 — draws, no secrets
    correction = sum(factors) / len(factors) / (sum(drawn) / count)
    return [factor * correction for factor in drawn]


def _message(costs: StepCosts, pair: tuple[int, int], size: float) -> MessageTimes:
    shared = tuple((name, byte_s * size) for name, byte_s in costs.shared.get(pair, ()))
    return MessageTimes(costs.byte_s.get(pair, 0.0) * size, costs.latency_s.get(pair, 0.0), shared)
