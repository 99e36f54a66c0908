"""Lower bounds, re-derived for ``verify`` from the problem alone: nothing here is shared with the solver.

``bottleneck``: over every subset of devices, which starts [q, L) can be covered without a stage as slow as
the bound. ``iteration``: every plan that simple paths do not rule out is simulated; where that is too many,
it is said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from skyctl.records.problem import Device, Problem
from skyctl.schedule.actions import in_flight
from skyctl.schedule.simulate import Boundary, Hop, StageTimes, simulate

TOLERANCE = 1e-9
MAX_SUBSET_STEPS = 20_000_000
MAX_PLANS = 30_000
MAX_NODES = 300_000


@dataclass(frozen=True)
class Proof:
    """``holds`` None: could not be checked here."""

    holds: bool | None
    detail: str


def layer_times(problem: Problem, device: Device) -> tuple[list[float], list[float], list[float]]:
    """(forward, backward, optimizer) seconds of every layer on a device."""
    times = problem.times.get(device.id)
    if times is not None:
        return list(times.forward_s), list(times.backward_s), list(times.optimizer_s)
    whole = [layer.flops / device.flops_per_s for layer in problem.layers]
    return [x / 3 for x in whole], [x * 2 / 3 for x in whole], [0.0] * len(whole)


def bottleneck_s(problem: Problem, stages: Iterable[tuple[str, int, int]]) -> float:
    """The largest stage's forward and backward, added up anew."""
    devices = {device.id: device for device in problem.devices}
    largest = 0.0
    for name, start, stop in stages:
        forward, backward, _ = layer_times(problem, devices[name])
        largest = max(largest, math.fsum(forward[start:stop]) + math.fsum(backward[start:stop]))
    return largest


def prove(problem: Problem, bound: float) -> Proof:
    """Whether no plan is better than ``bound`` (by more than 1e-9, relative)."""
    target = bound * (1 - TOLERANCE)
    if problem.objective == "bottleneck":
        return _prove_bottleneck(problem, target)
    volume = _prove_bottleneck(problem, (target - _least_optimizer(problem)) / problem.microbatches)
    if volume.holds:
        return Proof(True, "no stage can be fast enough for a better step (volume bound)")
    return _prove_iteration(problem, target)


def _least_optimizer(problem: Problem) -> float:
    return min(min(layer_times(problem, device)[2]) for device in problem.devices)


def _ends(problem: Problem, device: Device, flying: int, target: float) -> list[list[int]]:
    """Per start, the stops that stay under ``target`` seconds and fit in memory."""
    forward, backward, _ = layer_times(problem, device)
    room = math.inf if device.memory_bytes is None else device.memory_bytes * (1 + 1e-12)
    count = len(problem.layers)
    out: list[list[int]] = []
    for start in range(count):
        stops: list[int] = []
        busy = state = kept = most = 0.0
        for at in range(start, count):
            layer = problem.layers[at]
            busy += forward[at] + backward[at]
            state += layer.state_bytes
            kept += layer.activation_bytes
            most = max(most, layer.workspace_bytes)
            if busy >= target:
                break
            base = device.reserved_bytes + state + flying * kept + most
            if base > room:
                break
            received = problem.layers[start - 1].output_bytes if start else 0.0
            received += layer.output_bytes if at + 1 < count else 0.0
            if base + problem.receive_window * received <= room:
                stops.append(at + 1)
        out.append(stops)
    return out


def _prove_bottleneck(problem: Problem, target: float) -> Proof:
    count, layers = len(problem.devices), len(problem.layers)
    if count > 14 or 2**count * count * layers > MAX_SUBSET_STEPS:
        return Proof(None, f"{count} devices are too many to re-derive the bound from all subsets")
    m = problem.microbatches
    most = min(count, layers)
    numbers = {n: in_flight(problem.schedule, 0, n, m) for n in range(1, most + 1)}
    tables = {
        (k, d): _ends(problem, problem.devices[d], k, target)
        for k in set(numbers.values())
        for d in range(count)
    }
    sets = {key: [sum(1 << stop for stop in stops) for stops in table] for key, table in tables.items()}
    names = [device.id for device in problem.devices]
    first = set(names if problem.first_stage is None else problem.first_stage)
    last = set(names if problem.last_stage is None else problem.last_stage)
    covered: dict[int, int] = {0: 1 << layers}  # subset → bit set of starts q with [q, layers) covered
    for subset in range(1, 2**count):
        stages = subset.bit_count()
        if stages > most:
            continue
        # 1F1B's number depends on the stages from here to the end; GPipe's and sequential's on nothing
        key = numbers[stages]
        starts = 0
        for d in range(count):
            if not subset >> d & 1 or (stages == 1 and names[d] not in last):
                continue
            after = covered.get(subset ^ (1 << d), 0)
            if after:
                rows = sets[key, d]
                for q in range(layers):
                    if rows[q] & after and (q or names[d] in first):
                        starts |= 1 << q
        covered[subset] = starts
        if starts & 1:
            return Proof(False, "a plan below the bound exists")
    return Proof(True, f"no subset of the {count} devices covers the layers below it (all subsets)")


def _prove_iteration(problem: Problem, target: float) -> Proof:
    """Depth first over orders and cuts; a branch ends where a path through it reaches ``target``."""
    search = _Search(problem, target)
    try:
        better = search.run()
    except _TooManyError:
        return Proof(None, "too many plans to try; what is checked is that the bound is below the value")
    if better:
        return Proof(False, f"a plan of {better:.6g} s exists")
    return Proof(True, f"{search.plans} plans simulated, all others ruled out by paths through them")


class _TooManyError(Exception):
    pass


class _Search:
    """Plans faster than ``target``, by brute force with two simple bounds."""

    def __init__(self, problem: Problem, target: float) -> None:
        self.problem = problem
        self.target = target
        self.m = problem.microbatches
        self.count = len(problem.layers)
        self.plans = 0
        self.nodes = 0
        self.times = [layer_times(problem, device) for device in problem.devices]
        self.links = {(link.source, link.target): link for link in problem.links}
        sums = [math.fsum(f) + math.fsum(b) for f, b, _ in self.times]
        self.weights = [1 / x if x > 0 else 0.0 for x in sums]
        names = [device.id for device in problem.devices]
        self.first = set(names if problem.first_stage is None else problem.first_stage)
        self.last = set(names if problem.last_stage is None else problem.last_stage)
        self.ends: dict[tuple[int, int], list[list[int]]] = {}
        self._volume: dict[tuple[int, int], float] = {}

    def run(self) -> float | None:
        """A better plan's time, or None when there is none."""
        devices = len(self.problem.devices)
        limit = self.target / self.m
        for stages in range(1, min(devices, self.count) + 1):
            for d in range(devices):
                for s in range(stages):
                    k = in_flight(self.problem.schedule, s, stages, self.m)
                    if (k, d) not in self.ends:
                        self.ends[k, d] = _ends(self.problem, self.problem.devices[d], k, limit)
            found = self._extend([], 0, (1 << devices) - 1, stages, 0.0)
            if found is not None:
                return found
        return None

    def _extend(
        self, stages: list[tuple[int, int, int]], at: int, free: int, left: int, before: float
    ) -> float | None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _TooManyError
        number = len(stages)
        total = number + left
        k = in_flight(self.problem.schedule, number, total, self.m)
        for d in range(len(self.times)):
            name = self.problem.devices[d].id
            if not free >> d & 1:
                continue
            if (number == 0 and name not in self.first) or (left == 1 and name not in self.last):
                continue
            reached = before + (self._there_and_back(stages[-1][0], d, at) if stages else 0.0)
            forward, backward, _ = self.times[d]
            for stop in self.ends[k, d][at]:
                if (left == 1) != (stop == self.count) or self.count - stop < left - 1:
                    continue
                work = math.fsum(forward[at:stop]) + math.fsum(backward[at:stop])
                if reached + self.m * work >= self.target:
                    break
                rest = free & ~(1 << d)
                if reached + work + self.m * self._rest(stop, rest) >= self.target:
                    continue
                chosen = [*stages, (d, at, stop)]
                found = (
                    self._simulate(chosen)
                    if left == 1
                    else self._extend(chosen, stop, rest, left - 1, reached + work)
                )
                if found is not None:
                    return found
        return None

    def _rest(self, start: int, devices: int) -> float:
        """What the layers from ``start`` need at least per microbatch on the slowest of ``devices``."""
        key = (start, devices)
        if key not in self._volume:
            chosen = [d for d in range(len(self.times)) if devices >> d & 1]
            weights = sum(self.weights[d] for d in chosen)
            work = sum(
                min(
                    (self.weights[d] * (self.times[d][0][at] + self.times[d][1][at]) for d in chosen),
                    default=0,
                )
                for at in range(start, self.count)
            )
            self._volume[key] = work / weights * (1 - 1e-12) if weights > 0 else 0.0
        return self._volume[key]

    def _there_and_back(self, a: int, b: int, boundary: int) -> float:
        total = 0.0
        for hop in (self._hop(a, b, boundary), self._hop(b, a, boundary)):
            total += hop.latency_s + max(hop.link_s, *(x for _, x in hop.shared), 0.0)
        return total

    def _hop(self, a: int, b: int, boundary: int) -> Hop:
        size = self.problem.layers[boundary - 1].output_bytes
        ends = (self.problem.devices[a].id, self.problem.devices[b].id)
        link = self.links.get(ends)
        shared = tuple(
            (number, size / resource.bandwidth_bytes_per_s)
            for number, resource in enumerate(self.problem.shared)
            if any(tuple(pair) == ends for pair in resource.links)
        )
        if link is None:
            return Hop(shared=shared)
        return Hop(size / link.bandwidth_bytes_per_s, link.latency_s, shared)

    def _simulate(self, chosen: Sequence[tuple[int, int, int]]) -> float | None:
        self.plans += 1
        if self.plans > MAX_PLANS or self.problem.schedule == "eager-1f1b":
            raise _TooManyError  # eager 1F1B: depths are a decision too, and they are not enumerated here
        add: Callable[[list[float]], float] = math.fsum
        stages = [
            StageTimes(*(add(column[start:stop]) for column in self.times[d])) for d, start, stop in chosen
        ]
        boundaries = [
            Boundary(self._hop(a, b, cut), self._hop(b, a, cut))
            for (a, _, cut), (b, _, _) in itertools.pairwise(chosen)
        ]
        flying = [in_flight(self.problem.schedule, s, len(chosen), self.m) for s in range(len(chosen))]
        step = simulate(self.problem.schedule, self.m, flying, stages, boundaries)
        return step.iteration_s if step.iteration_s < self.target else None
