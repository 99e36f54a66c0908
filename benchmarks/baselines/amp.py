"""AMP's choice (Li et al., NeurIPS 2022, 2210.07297): how many pipelines, of how many stages.

From the published source (``cost_het_cluster.py``, ``pipe.py``), without tensor parallelism: a layer costs
the mean of all devices' times; a row of layers is cut where (B − 1) · the slowest stage + all stages + all
messages between stages is least, B the microbatches of one pipeline; to that comes the slowest stage's
all-reduce, 2 (n − 1)/n · bytes over the slowest link of its ring. All pipelines have the same cuts and as
many samples. Degrees are tried one by one, and which device goes where by annealing; here all placements are
tried, up to what makes no difference. Memory and microbatches' sizes are left as they are. All messages
between stages count, and all links of a ring; the published code counts the last ones only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations
from typing import NamedTuple

from baselines.common import NotApplicableError
from skyctl.records.problem import Layer, Problem


class Choice(NamedTuple):
    """``grid``: by pipeline, its stages' devices; ``cuts``: [0, …, layers] of all of them; seconds a step."""

    grid: tuple[tuple[str, ...], ...]
    cuts: tuple[int, ...]
    step_s: float


def choose(problem: Problem) -> Choice:
    """The best of all degrees; NotApplicableError where none divides devices and microbatches."""
    devices, layers = len(problem.devices), _layer_seconds(problem)
    found = []
    for pipelines in range(1, devices + 1):
        if devices % pipelines or problem.microbatches % pipelines:
            continue
        stages = devices // pipelines
        if stages > len(layers):
            continue
        rounds = problem.microbatches // pipelines
        for grid in _grids([device.id for device in problem.devices], pipelines, stages):
            found += [_cost(problem, layers, grid, cuts, rounds) for cuts in _cuts(len(layers), stages)]
    if not found:
        raise NotApplicableError("no degree divides the devices and the microbatches")
    return min(found, key=lambda choice: choice.step_s)


def _layer_seconds(problem: Problem) -> list[float]:
    rows = []
    for device in problem.devices:
        times = problem.times[device.id]
        rows.append([f + b for f, b in zip(times.forward_s, times.backward_s, strict=True)])
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _grids(names: Sequence[str], pipelines: int, stages: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All placements, the pipelines in order of their first devices."""
    for order in permutations(names):
        grid = tuple(order[p * stages : (p + 1) * stages] for p in range(pipelines))
        if list(grid) == sorted(grid):
            yield grid


def _cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def _cost(
    problem: Problem,
    layers: Sequence[float],
    grid: tuple[tuple[str, ...], ...],
    cuts: tuple[int, ...],
    rounds: int,
) -> Choice:
    lines = {(link.source, link.target): link.bandwidth_bytes_per_s for link in problem.links}
    work = [math.fsum(layers[start:stop]) for start, stop in pairwise(cuts)]
    step_s = (rounds - 1) * max(work) + math.fsum(work)
    for s, cut in enumerate(cuts[1:-1]):
        size = problem.layers[cut - 1].output_bytes
        step_s += sum(size / lines[row[s], row[s + 1]] for row in grid) / len(grid)
    sums = [0.0]
    for s, (start, stop) in enumerate(pairwise(cuts)):
        ring = [row[s] for row in grid]
        if len(ring) > 1:
            slowest = min(lines[a, b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))
            size = math.fsum(_gradient_bytes(layer) for layer in problem.layers[start:stop])
            sums.append(2 * (len(ring) - 1) / len(ring) * size / slowest)
    return Choice(grid, cuts, step_s + max(sums))


def _gradient_bytes(layer: Layer) -> float:
    return layer.state_bytes / 4 if layer.gradient_bytes is None else layer.gradient_bytes
