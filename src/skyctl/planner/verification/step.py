"""A step of any plan, played anew from records for ``verify``: computing, what is summed, and memory.

Nothing is shared with the planner's models. Pipelines are simulated side by side; what their devices sum is
served link by link, resource by resource, in the order in which layers are released. One pipeline sums
nothing; where devices hold all layers each, every pipeline has one stage. Rounds are in ``round_step.py``, a
parameter server in ``stale_step.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from skyctl.planner.verification.problem_data import MEMORY_ROUNDING, Array, ProblemData
from skyctl.planner.verification.problem_data import sums as prefix_sums
from skyctl.planner.verification.reading import HeldRange, ReadPlan, Row, SummedRange
from skyctl.planner.verification.routes import children
from skyctl.planner.verification.sums import CheckedSums
from skyctl.records.problem import Problem
from skyctl.schedule.joint_simulation import ends_together
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes

LEAST_EDGE_BYTES = 2097152.0
"""Of an edge's messages, whatever their size, so much is kept room for."""

Ends = Mapping[HeldRange, float]
"""By stage, when its last backward ends; all stages of a plan in the order of ranks."""
Served = dict[object, list[tuple[Array, Array, Array]]]
"""By link, resource or helper: of layers that wait for it, when they may, in which order, for how long."""


class StepTimes(NamedTuple):
    """Seconds of a step and of its exposed sums; by stage of computing, optimizer included, and idle."""

    iteration_s: float
    sync_s: float
    compute_s: tuple[float, ...]
    idle_s: tuple[float, ...]


class CheckedStep:
    """One problem's layers, links and devices, as the contract reads them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem = problem.with_steps_spread()
        self.alone = problem.parallel == "pipeline" and not problem.rhythm.is_rounds
        # bounds of plans side by side are of stages that keep their activations
        self.facts = ProblemData(problem if self.alone else problem.model_copy(update={"recompute": False}))
        self.ids = [device.id for device in problem.devices]
        self.devices = {device.id: device for device in problem.devices}
        self.index = {name: number for number, name in enumerate(self.ids)}
        self.sums = CheckedSums(problem)
        self.links = {(x.source, x.target): x for x in problem.links}
        self._shared: dict[tuple[str, str], dict[int, float]] = {}
        for number, resource in enumerate(problem.shared):
            for source, target in resource.links:
                self._shared.setdefault((source, target), {})[number] = resource.bandwidth_bytes_per_s
        self._ties = [frozenset(tie.layers) for tie in problem.ties]
        self._columns: dict[int, tuple[list[float], list[float], list[float]]] = {}

    # Computing

    def columns(self, device: int) -> tuple[list[float], list[float], list[float]]:
        """(forward, backward, optimizer) seconds of every layer."""
        if device not in self._columns:
            forward, backward, optimizer = (x.tolist() for x in self.facts.columns(device))
            self._columns[device] = (forward, backward, optimizer)
        return self._columns[device]

    def backward_s(self, held: HeldRange) -> list[float]:
        """By layer that it holds, its backward, with what is computed again before it."""
        forward, backward, _ = self.columns(held.device)
        part = slice(held.start, held.stop)
        if not held.recompute:
            return backward[part]
        return [f + b for f, b in zip(forward[part], backward[part], strict=True)]

    def layers_s(self, held: HeldRange) -> float:
        """Forward and backward of one microbatch."""
        return math.fsum([*self.columns(held.device)[0][held.start : held.stop], *self.backward_s(held)])

    def optimizer_s(self, held: HeldRange) -> float:
        """Of all layers that it holds, with what else sums take its processor beside adding and sending."""
        part = slice(held.start, held.stop)
        optimizer_s = math.fsum(self.columns(held.device)[2][part])
        if self.alone or self.ids[held.device] not in self.problem.times:
            return optimizer_s
        return optimizer_s + self.problem.devices[held.device].reduce_byte_s * math.fsum(
            self.sums.format.added[part]
        )

    def stage_times(self, held: HeldRange) -> StageTimes:
        """Forward and backward with what they take besides layers, and the optimizer."""
        part = slice(held.start, held.stop)
        more_s = self.facts.stage_overhead_s(held.device, held.start, held.stop)
        forward_s = math.fsum(self.columns(held.device)[0][part]) + more_s
        backward_s = math.fsum(self.backward_s(held))
        weight_s = 0.0
        if self.facts.split and not held.recompute:
            weight_s = min(backward_s, math.fsum(self.facts.weights(held.device)[part].tolist()))
        return StageTimes(forward_s, backward_s + more_s, self.optimizer_s(held), weight_s)

    def computes_s(self, held: HeldRange) -> float:
        """Its forwards and backwards of a step."""
        times = self.stage_times(held)
        return held.microbatches * (times.forward_s + times.backward_s)

    def simulation(self, row: Row) -> SimulationInput:
        """A pipeline as the simulator plays it."""
        return SimulationInput(
            schedule=self.problem.schedule,
            microbatches=row[0].microbatches,
            in_flight=tuple(held.in_flight for held in row),
            deferred_weights=tuple(held.weights_behind for held in row),
            stages=tuple(self.stage_times(held) for held in row),
            boundaries=tuple(self._boundary(a, b) for a, b in pairwise(row)),
        )

    def ends(self, row: Row) -> tuple[float, ...]:
        """By stage of a pipeline that runs alone, when its last backward ends."""
        return (self.computes_s(row[0]),) if len(row) == 1 else self.simulation(row).simulate().ended_s

    def _boundary(self, a: HeldRange, b: HeldRange) -> BoundaryTimes:
        size = self.problem.layers[a.stop - 1].output_bytes
        return BoundaryTimes(self.hop(a.device, b.device, size), self.hop(b.device, a.device, size))

    def hop(self, source: int, target: int, size: float) -> MessageTimes:
        """A message of activations; of it a link may send less."""
        ends = (self.ids[source], self.ids[target])
        link = self.links.get(ends)
        size *= 1.0 if link is None else link.sent_share
        also = tuple((number, size / rate) for number, rate in self._shared.get(ends, {}).items())
        if link is None:
            return MessageTimes(shared=also)
        return MessageTimes(size / link.bandwidth_bytes_per_s, link.latency_s, also)

    # Parameters that several layers share

    def splits_tie(self, start: int, stop: int) -> bool:
        """Whether [start, stop) holds some of the layers that share parameters, and not the others."""
        if not self._ties:
            return False
        held = set(range(start, stop))
        return any(held & tie and not tie <= held for tie in self._ties)

    def tie_exchange_s(self, row: Row) -> float:
        """In which the replicas of shared parameters' copies sum gradients over the first of them."""
        seconds = []
        for tie in self.problem.ties:
            first, *later = (
                self.ids[held.device]
                for held in row
                if not set(range(held.start, held.stop)).isdisjoint(tie.layers)
            )
            ways = [[(x, first) for x in later], [(first, x) for x in later]]
            there = [[self.links[edge] for edge in way if edge in self.links] for way in ways]
            uses: dict[int, int] = {}
            for edge in (edge for way in ways for edge in way):
                for number in self._shared.get(edge, ()):
                    uses[number] = uses.get(number, 0) + 1
            busy = [tie.bytes / link.bandwidth_bytes_per_s for links in there for link in links]
            busy += [tie.bytes * n * self.sums.wires.shared_s[number] for number, n in uses.items()]
            latency_s = sum(max((link.latency_s for link in links), default=0.0) for links in there)
            seconds.append(max(busy, default=0.0) + latency_s)
        return math.fsum(seconds)

    # Memory

    def stage_bytes(self, held: HeldRange) -> float:
        """Its bytes but for messages of sums: the contract's formula, and what sums and rhythm keep."""
        layers = self.problem.layers[held.start : held.stop]
        kept = [x.activation_bytes for x in layers]
        once = [x.workspace_bytes for x in layers]
        parts = [self.problem.devices[held.device].reserved_bytes, *(x.state_bytes for x in layers)]
        if held.recompute:
            once = [x.activation_bytes + x.workspace_bytes for x in layers]
            for i in range(max(1, held.start), held.stop):
                entering = self.problem.layers[i - 1].output_bytes
                kept[i - held.start] = min(kept[i - held.start], entering)
        elif self.facts.split:
            parts.append((held.weights_behind + 1) * math.fsum(x.deferred_bytes for x in layers))
        parts += [held.in_flight * math.fsum(kept), max(once)]
        window = self.problem.receive_window
        if held.start:
            parts.append(window * self.problem.layers[held.start - 1].output_bytes)
        if held.stop < len(self.problem.layers):
            parts.append(window * layers[-1].output_bytes)
        if not self.alone:
            parts += self.sums.format.kept[held.start : held.stop]
            parts.append(self._copies() * self.weight_bytes(held))
        return math.fsum(parts)

    def _copies(self) -> int:
        """How many more copies of its weights a stage has in rounds."""
        rhythm, rounded = self.problem.rhythm, self.problem.sync_format != "float32"
        if not rhythm.is_rounds:
            return 0
        return self.keeps_start + rounded + (rhythm.outer_momentum > 0)

    @property
    def keeps_start(self) -> bool:
        """Whether stages keep the weights that a round began with."""
        rhythm = self.problem.rhythm
        compares = rhythm.prox_mu > 0 or (rhythm.outer_lr, rhythm.outer_momentum) != (1, 0)
        return self.problem.owners is not None or compares or self.problem.sync_format != "float32"

    def weight_bytes(self, held: HeldRange) -> float:
        """Of its trained weights in float32."""
        return math.fsum(self.sums.format.floats[held.start : held.stop])

    def held_bytes(self, held: HeldRange, arriving: int, chunk_bytes: int) -> float:
        """With messages on so many edges that bring partial sums; with a server, what it keeps for others."""
        need = self.stage_bytes(held) + edge_bytes(arriving, chunk_bytes)
        if self.problem.rhythm.is_stale:
            # a buffer for gradients; a server's weights, and a buffer for each other device
            need += math.fsum(self.sums.sizes) * (1 + (1 + arriving if arriving else 0))
        return need

    def need_bytes(self, held: HeldRange, groups: Sequence[SummedRange], chunk_bytes: int) -> float:
        """The bytes that a stage needs, over all groups that it is part of."""
        name = self.ids[held.device]
        arriving = sum(children(group.trees).get(name, 0) for group in _groups_of(held, groups))
        return self.held_bytes(held, arriving, chunk_bytes)

    def helper_bytes(self, name: str, arriving: int, chunk_bytes: int) -> float:
        """The bytes that a device needs if it only adds and passes on what arrives over so many edges."""
        return self.devices[name].reserved_bytes + edge_bytes(arriving, chunk_bytes)

    def fits(self, name: str, need_bytes: float) -> bool:
        """Whether a device has that many bytes."""
        has = self.devices[name].memory_bytes
        return has is None or need_bytes <= has * (1 + MEMORY_ROUNDING)

    # The step

    def processors_s(self, held: Sequence[HeldRange], groups: Sequence[SummedRange]) -> list[float]:
        """By stage, its processor's seconds for the bytes of all its groups."""
        factor = self.sums.message_factor(
            max(self.sums.byte_s(group.trees, group.devices) for group in groups)
        )
        return [
            math.fsum(
                self.sums.processor_byte_s(self.problem.devices[stage.device], group.trees, factor)
                * self.sums.group_bytes(group)
                for group in _groups_of(stage, groups)
            )
            for stage in held
        ]

    def play(self, read: ReadPlan) -> StepTimes:
        """One step: it sums nothing, or sums after it, or with a delay what the step before has left."""
        if len(read.rows) == 1:
            return self._play_alone(read.rows[0])
        alone = [self.ends(row) for row in read.rows]
        together = ends_together([self.simulation(row) for row in read.rows], alone)
        ends = dict(zip(read.held, (end_s for row in together for end_s in row), strict=True))
        busy = dict(zip(ends, self.processors_s(tuple(ends), read.groups), strict=True))
        after = {
            stage: self.optimizer_s(stage) + (busy[stage] if self.sums.delayed else 0.0) for stage in ends
        }
        if self.sums.delayed:
            ready_s = max(end_s + after[stage] for stage, end_s in ends.items())
            longest_s = self._longest_sum_s(read, ends)
            iteration_s, sync_s = max(ready_s, longest_s), max(0.0, longest_s - ready_s)
        else:
            lines = self._served_s(self._waiting(read.groups, ends))
            done_s = max(*lines, *ends.values(), *(end_s + busy[stage] for stage, end_s in ends.items()))
            done_s += max(self._way_s(group, read.chunk_bytes) for group in read.groups)
            iteration_s, sync_s = done_s + max(after.values()), done_s - max(ends.values())
        compute_s = tuple(self.computes_s(stage) + after[stage] for stage in ends)
        return StepTimes(iteration_s, sync_s, compute_s, tuple(max(0.0, iteration_s - x) for x in compute_s))

    def _play_alone(self, row: Row) -> StepTimes:
        """Optimizers follow their own stage's last backward; then copies of shared parameters are summed."""
        step = self.simulation(row).simulate()
        exchange_s = self.tie_exchange_s(row)
        return StepTimes(step.iteration_s + exchange_s, exchange_s, step.compute_s, step.idle_s)

    def _way_s(self, group: SummedRange, chunk_bytes: float) -> float:
        return self.sums.latency_s(group.trees) + self.sums.fill_s(group, chunk_bytes)

    def _waiting(self, groups: Sequence[SummedRange], ends: Ends) -> Served:
        """Each layer waits from the time at which the last of its replicas releases its gradients."""
        waiting: Served = {}
        for group in groups:
            released = []
            for held in (held for held in ends if held.start <= group.start < held.stop):
                before = prefix_sums(np.array(self.backward_s(held)))
                released.append(ends[held] - before[group.start - held.start : group.stop - held.start])
            at_s = np.max(released, axis=0)
            sizes = np.array(self.sums.format.late(group.start, group.stop))
            places = -np.arange(group.start, group.stop, dtype=float)
            for what, byte_s in self.sums.used_s(group.trees, group.devices).items():
                waiting.setdefault(what, []).append((at_s, places, sizes * byte_s))
        return waiting

    def _served_s(self, waiting: Served) -> Iterator[float]:
        """When each link, resource and helper has served all that wait, one after the other."""
        for served in waiting.values():
            at_s, places, spent_s = (np.concatenate(x) for x in zip(*served, strict=True))
            order = np.lexsort((places, at_s))
            rest_s = np.cumsum(spent_s[order][::-1])[::-1]
            yield float((at_s[order] + rest_s).max())

    def _longest_sum_s(self, read: ReadPlan, ends: Ends) -> float:
        """Of the sums of the step before: the most of a line, and of a group from its release to its end."""
        waiting: dict[object, list[tuple[float, int, float]]] = {}
        begun: dict[int, float] = {}
        for group in read.groups:
            begun[group.start] = max(
                end_s for held, end_s in ends.items() if held.start <= group.start < held.stop
            )
            size = self.sums.group_bytes(group)
            for what, byte_s in self.sums.used_s(group.trees, group.devices).items():
                waiting.setdefault(what, []).append((begun[group.start], -group.start, size * byte_s))
        last = dict(begun)
        longest_s = 0.0
        for served in waiting.values():
            free_s = -math.inf
            for at_s, place, spent_s in sorted(served):
                free_s = max(free_s, at_s) + spent_s
                last[-place] = max(last[-place], free_s)
            longest_s = max(longest_s, math.fsum(spent_s for _, _, spent_s in served))
        for group in read.groups:
            sum_s = last[group.start] - begun[group.start] + self._way_s(group, read.chunk_bytes)
            longest_s = max(longest_s, sum_s)
        return longest_s


def edge_bytes(arriving: int, chunk_bytes: int) -> float:
    """For the messages on so many edges that bring partial sums."""
    return max(LEAST_EDGE_BYTES, 2.0 * chunk_bytes) * arriving


def _groups_of(held: HeldRange, groups: Sequence[SummedRange]) -> Iterator[SummedRange]:
    return (group for group in groups if held.start <= group.start < held.stop)
