"""Layer counts in proportion to a weight per device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from baselines.common import Assignment, NotApplicableError, assignment, free_bytes, speeds
from skyctl.records.problem import Problem


def even(problem: Problem) -> Assignment:
    """The same number of layers for each device, the first ones one more where it does not divide."""
    share, more = divmod(len(problem.layers), len(problem.devices))
    return _counted(problem, [share + (d < more) for d in range(len(problem.devices))])


def ram_proportional(problem: Problem) -> Assignment:
    """Counts in proportion to the devices' memory, largest remainder, at least one layer each.

    exo's rule for pipelines (``allocate_layers_proportionally`` in exo's placement, 2025): what is over goes
    to the largest remainders; a device left without a layer takes one from the largest share.
    """
    memory = free_bytes(problem)
    if math.inf in memory:
        raise NotApplicableError("in proportion to memory: a device's memory is unlimited")
    counts = largest_remainder(len(problem.layers), memory)
    for d, count in enumerate(counts):
        if count == 0:
            counts[counts.index(max(counts))] -= 1
            counts[d] = 1
    return _counted(problem, counts)


def speed_proportional(problem: Problem) -> Assignment:
    """Counts in proportion to the devices' speeds, capped by memory, largest remainder.

    Parallax's style (GradientHQ, ``adjust_pipeline_layers``, 2025): water-filling finds the λ for which
    Σ min(capacity, λ · speed) is the number of layers, rounded down, the largest remainders rounded up. It
    counts layers and takes them as equal; its capacity is a number of layers of mean size, ours too.
    """
    layers = len(problem.layers)
    mean = math.fsum(x.state_bytes + x.activation_bytes for x in problem.layers) / layers
    caps = [
        layers if free == math.inf or mean <= 0 else min(layers, max(0, int(free / mean)))
        for free in free_bytes(problem)
    ]
    if sum(caps) < layers:
        raise NotApplicableError("in proportion to speed: the devices' capacities do not hold all layers")
    return _counted(problem, largest_remainder(layers, speeds(problem), caps))


def largest_remainder(total: int, weights: Sequence[float], caps: Sequence[int] | None = None) -> list[int]:
    """``total`` in whole shares in proportion to ``weights``, none above its cap (caps must suffice)."""
    limits = [total] * len(weights) if caps is None else list(caps)
    ideal = _water_fill(total, weights, limits)
    counts = [min(limit, math.floor(x + 1e-9)) for x, limit in zip(ideal, limits, strict=True)]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - ideal[i], i))
    while sum(counts) < total:
        for i in by_remainder:
            if sum(counts) < total and counts[i] < limits[i]:
                counts[i] += 1
    return counts


def _water_fill(total: int, weights: Sequence[float], caps: Sequence[int]) -> list[float]:
    """min(cap, λ · weight) with the λ for which they sum to ``total``: caps that bind are set one by one."""
    free = set(range(len(weights)))
    ideal = [0.0] * len(weights)
    left = float(total)
    while free:
        rate = left / math.fsum(weights[i] for i in free)
        full = {i for i in free if rate * weights[i] > caps[i]}
        if not full:
            for i in free:
                ideal[i] = rate * weights[i]
            break
        for i in full:
            ideal[i] = float(caps[i])
            left -= caps[i]
        free -= full
    return ideal


def _counted(problem: Problem, counts: Sequence[int]) -> Assignment:
    return assignment(problem, [0, *accumulate(counts)])
