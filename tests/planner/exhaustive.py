"""Brute force over every order, subset and cut, affordable at 5 devices × 8 layers.

Every plan that fits is listed with a plain lower bound on its value; they are played by the simulator in the
order of that bound until the bound of the next one is no smaller than the best value seen. Memory, times and
bounds are computed here from the records, in the contract's words; nothing is shared with the planner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from skyctl.records.problem import Device, LayerTimes, Problem
from skyctl.schedule.actions import least_in_flight
from skyctl.schedule.simulation import simulate
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

Order = tuple[Device, ...]
Cuts = tuple[int, ...]


class Candidate(NamedTuple):
    """A plan that fits: stage s is layers [cuts[s], cuts[s + 1]) on order[s]."""

    bound_s: float
    order: Order
    cuts: Cuts


def exhaustive(problem: Problem) -> float | None:
    """The least value of any plan that the contract allows; None when there is none."""
    tables = Tables(problem)
    best: float | None = None
    for candidate in sorted(tables.candidates(), key=lambda c: c.bound_s):
        if best is not None and candidate.bound_s >= best:
            break
        value = tables.value_s(candidate.order, candidate.cuts)
        best = value if best is None else min(best, value)
    return best


class Tables:
    """Per device and range of layers: whether it fits, and its times."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.layers = len(problem.layers)
        self.times = {
            (device.id, p, q): stage_times(problem, device, p, q)
            for device in problem.devices
            for p, q in itertools.combinations(range(self.layers + 1), 2)
        }
        self.links = {(x.source, x.target): x for x in problem.links}
        self.shared = [(x, set(x.links)) for x in problem.shared]

    def candidates(self) -> Iterator[Candidate]:
        """All plans that memory and pins allow."""
        problem = self.problem
        for stages in range(1, min(len(problem.devices), self.layers) + 1):
            in_flight = [
                least_in_flight(problem.schedule, s, stages, problem.microbatches) for s in range(stages)
            ]
            fitting = {
                (device.id, p, q, number)
                for device in problem.devices
                for p, q in itertools.combinations(range(self.layers + 1), 2)
                for number in set(in_flight)
                if fits(problem, device, p, q, number)
            }
            for order in itertools.permutations(problem.devices, stages):
                if problem.first_stage is not None and order[0].id not in problem.first_stage:
                    continue
                if problem.last_stage is not None and order[-1].id not in problem.last_stage:
                    continue
                for inner in itertools.combinations(range(1, self.layers), stages - 1):
                    cuts = (0, *inner, self.layers)
                    if all(
                        (device.id, cuts[s], cuts[s + 1], in_flight[s]) in fitting
                        for s, device in enumerate(order)
                    ):
                        yield Candidate(self.bound_s(order, cuts), order, cuts)

    def bound_s(self, order: Order, cuts: Cuts) -> float:
        """No step is shorter: fill up to a stage, all its own work, and its optimizer or the drain after it.

        For ``bottleneck`` this is the value itself.
        """
        entries = [self.times[device.id, cuts[s], cuts[s + 1]] for s, device in enumerate(order)]
        if self.problem.objective == "bottleneck":
            return max(x.forward_s + x.backward_s for x in entries)
        m = self.problem.microbatches
        fill = drain = 0.0
        least = 0.0
        for entry in entries:
            own = m * (entry.forward_s + entry.backward_s)
            least = max(least, fill + own + max(entry.optimizer_s, drain))
            fill += entry.forward_s
            drain += entry.backward_s
        return least * (1 - 1e-12)  # sums in another order round differently

    def value_s(self, order: Order, cuts: Cuts) -> float:
        """The problem's objective for one plan."""
        problem = self.problem
        if problem.objective == "bottleneck":
            return self.bound_s(order, cuts)
        stages = len(order)
        boundaries = [
            BoundaryTimes(
                self.hop(a.id, b.id, problem.layers[cut - 1].output_bytes),
                self.hop(b.id, a.id, problem.layers[cut - 1].output_bytes),
            )
            for a, b, cut in zip(order, order[1:], cuts[1:], strict=False)
        ]
        entries = [self.times[device.id, cuts[s], cuts[s + 1]] for s, device in enumerate(order)]
        in_flight = [
            least_in_flight(problem.schedule, s, stages, problem.microbatches) for s in range(stages)
        ]
        return simulate(problem.schedule, problem.microbatches, in_flight, entries, boundaries).iteration_s

    def hop(self, source: str, target: str, size: float) -> MessageTimes:
        """One message of ``size`` bytes."""
        shared = tuple(
            (x.name, size / x.bandwidth_bytes_per_s) for x, pairs in self.shared if (source, target) in pairs
        )
        link = self.links.get((source, target))
        if link is None:
            return MessageTimes(0.0, 0.0, shared)
        return MessageTimes(size / link.bandwidth_bytes_per_s, link.latency_s, shared)


def stage_times(problem: Problem, device: Device, start: int, stop: int) -> StageTimes:
    """The times of layers [start, stop) on ``device``: measured, else a third of flops / speed forward."""
    times: LayerTimes | None = problem.times.get(device.id)
    if times is None:
        work = sum(layer.flops for layer in problem.layers[start:stop]) / device.flops_per_s
        return StageTimes(work / 3, work * 2 / 3, 0.0)
    at = slice(start, stop)
    return StageTimes(sum(times.forward_s[at]), sum(times.backward_s[at]), sum(times.optimizer_s[at]))


def fits(problem: Problem, device: Device, start: int, stop: int, in_flight: int) -> bool:
    """Whether layers [start, stop) with that many in flight fit in the device's memory."""
    if device.memory_bytes is None:
        return True
    part = problem.layers[start:stop]
    received = problem.layers[start - 1].output_bytes if start else 0.0
    received += part[-1].output_bytes if stop < len(problem.layers) else 0.0
    need = device.reserved_bytes + sum(x.state_bytes for x in part)
    need += in_flight * sum(x.activation_bytes for x in part)
    need += max(x.workspace_bytes for x in part) + problem.receive_window * received
    return need <= device.memory_bytes
