"""Metis's layer balancer (Um et al., USENIX ATC 2024): shares of normalised compute capacity, in slices.

From the published source (``LayerComputeBalancer``): every layer is cut into seven equal slices; stages take
slices in order while their capacity exceeds the next one; the last stage fills itself from the end; what is
left goes to the stage with the most capacity left among those it lies between; a stage owns the layers of
which it has more than half the slices; then the stage with the most spare capacity takes up to three layers
from its fuller neighbour while the largest spare capacity does not grow. Order of devices as given (Metis
searches over orders outside of this), memory left out. A layer of which no stage has more than half goes to
the one with most of it; the published code would lose it.
"""

from __future__ import annotations

from itertools import accumulate

from baselines.common import Assignment, assignment, costs, prefix, speeds
from skyctl.records.problem import Problem

SLICES = 7
MOVES = 3


def capacity_slices(problem: Problem) -> Assignment:
    """Devices in inventory order."""
    values, rates = costs(problem), speeds(problem)
    demand = [value / sum(values) for value in values]
    capacity = [rate / sum(rates) for rate in rates]
    counts = _adjusted(_owned(_sliced(demand, capacity), len(demand), len(capacity)), demand, capacity)
    return assignment(problem, [0, *accumulate(counts)])


def _sliced(demand: list[float], capacity: list[float]) -> list[int]:
    """The stage of each slice, in order of the slices."""
    size = [value / SLICES for value in demand for _ in range(SLICES)]
    left = list(capacity)
    last = len(capacity) - 1
    stage: list[int | None] = [None] * len(size)
    at = 0
    for s in range(last):
        while at < len(size) - SLICES - 1:
            fitting = left[s] > size[at]
            if fitting:
                left[s] -= size[at]
                stage[at] = s
            at += 1  # the slice that did not fit stays open: the next stage begins behind it
            if not fitting:
                break
    end = len(size)
    while end and stage[end - 1] is None:
        if len(size) - end >= SLICES and left[last] <= size[end - 1]:
            break
        end -= 1
        left[last] -= size[end]
        stage[end] = last
    for i, known in enumerate(stage):
        if known is None:
            low = max((s for s in stage[:i] if s is not None), default=0)
            high = min((s for s in stage[i + 1 :] if s is not None), default=last)
            chosen = max(range(low, high + 1), key=lambda s: (left[s], -s))
            left[chosen] -= size[i]
            stage[i] = chosen
    return [s for s in stage if s is not None]


def _owned(slices: list[int], layers: int, stages: int) -> list[int]:
    """Layers per stage, by majority of slices."""
    counts = [0] * stages
    for i in range(layers):
        part = slices[i * SLICES : (i + 1) * SLICES]
        counts[max(part, key=lambda s: (part.count(s), -s))] += 1
    return counts


def _adjusted(counts: list[int], demand: list[float], capacity: list[float]) -> list[int]:
    """Up to three layers moved to the stage with the most spare capacity."""
    work = prefix(demand)

    def spare(shares: list[int]) -> list[float]:
        cuts = [0, *accumulate(shares)]
        return [c - (work[q] - work[p]) for c, p, q in zip(capacity, cuts, cuts[1:], strict=False)]

    limit = max(spare(counts))
    moved = list(counts)
    for _ in range(MOVES):
        room = spare(moved)
        taker = room.index(max(room))
        near = [s for s in (taker - 1, taker + 1) if 0 <= s < len(room)]
        if near:
            giver = min(near, key=lambda s: room[s])
            if moved[giver] > 1:
                moved[giver] -= 1
                moved[taker] += 1
        if max(spare(moved)) > limit:
            break
        counts, limit = list(moved), max(spare(moved))
    return counts
