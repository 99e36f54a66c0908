"""A step of several pipelines side by side, played anew from records for ``verify``.

Nothing is shared with ``planner/hybrid``. Pipelines are simulated side by side, and what their devices sum is
served link by link and resource by resource, in the order in which layers are released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from skyctl.planner.verification.data_step import (
    LEAST_EDGE_BYTES,
    CheckedRoute,
    DataStep,
    children,
    ring_and_stars,
)
from skyctl.planner.verification.problem_data import ProblemData
from skyctl.records.problem import Problem
from skyctl.schedule.actions import BACKWARD
from skyctl.schedule.joint_simulation import ends_together
from skyctl.schedule.simulation import BoundaryTimes, MessageTimes, StageTimes, last_backward_ends
from skyctl.schedule.simulation_input import SimulationInput

Trees = tuple[CheckedRoute, ...]


class HeldRange(NamedTuple):
    """Layers [start, stop) on a device (its index in the problem) of a pipeline of ``microbatches``."""

    device: int
    start: int
    stop: int
    in_flight: int
    microbatches: int


class SummedRange(NamedTuple):
    """Layers [start, stop) that one device of every pipeline holds, and the routes of their gradients."""

    start: int
    stop: int
    trees: Trees


class HybridTimes(NamedTuple):
    """Seconds of a step, of what sums take after the last backward, and by stage of computing."""

    iteration_s: float
    sync_s: float
    compute_s: tuple[float, ...]


Rows = Sequence[Sequence[HeldRange]]


class CheckedHybrid:
    """One problem's layers, links and devices, as the contract's Hybrids reads them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.facts = ProblemData(problem.model_copy(update={"recompute": False}))
        self.data = DataStep(problem)
        self.ids = [device.id for device in problem.devices]
        self.columns = [
            tuple(column.tolist() for column in self.facts.columns(d)) for d in range(len(self.ids))
        ]
        self._ties = [frozenset(tie.layers) for tie in problem.ties]
        self._shared: dict[tuple[str, str], dict[int, float]] = {}
        for number, resource in enumerate(problem.shared):
            for source, target in resource.links:
                self._shared.setdefault((source, target), {})[number] = resource.bandwidth_bytes_per_s

    def splits_tie(self, start: int, stop: int) -> bool:
        """Whether [start, stop) holds some of the layers that share parameters, and not the others."""
        if not self._ties:
            return False
        held = set(range(start, stop))
        return any(held & tie and not tie <= held for tie in self._ties)

    def optimizer_s(self, held: HeldRange) -> float:
        """Of all layers that it holds, with what else sums take its processor beside adding and sending."""
        byte_s = self.problem.devices[held.device].reduce_byte_s
        if self.ids[held.device] not in self.problem.times:
            byte_s = 0.0
        added = math.fsum(self.data.format.added[held.start : held.stop])
        return math.fsum(self.columns[held.device][2][held.start : held.stop]) + byte_s * added

    def layers_s(self, held: HeldRange) -> float:
        """Forward and backward of one microbatch."""
        forward, backward, _ = self.columns[held.device]
        part = slice(held.start, held.stop)
        return math.fsum([*forward[part], *backward[part]])

    def stage_times(self, held: HeldRange) -> StageTimes:
        """Forward and backward with what they take besides layers."""
        forward, backward, _ = self.columns[held.device]
        part = slice(held.start, held.stop)
        more_s = self.facts.stage_overhead_s(held.device, held.start, held.stop)
        return StageTimes(math.fsum(forward[part]) + more_s, math.fsum(backward[part]) + more_s)

    def stage_bytes(self, held: HeldRange) -> float:
        """What it needs but for chunks: the contract's formula, and what sums keep of its gradients."""
        entry = self.problem.devices[held.device]
        layers = self.problem.layers[held.start : held.stop]
        parts = [entry.reserved_bytes, *(x.state_bytes for x in layers)]
        parts += [held.in_flight * math.fsum(x.activation_bytes for x in layers)]
        parts += [max(x.workspace_bytes for x in layers)]
        window = self.problem.receive_window
        if held.start:
            parts.append(window * self.problem.layers[held.start - 1].output_bytes)
        if held.stop < len(self.problem.layers):
            parts.append(window * layers[-1].output_bytes)
        parts += self.data.format.kept[held.start : held.stop]
        return math.fsum(parts)

    def need_bytes(self, held: HeldRange, groups: Sequence[SummedRange], chunk_bytes: int) -> float:
        """With the chunks of all edges that bring it partial sums, over all of its groups."""
        arriving = sum(
            children(group.trees).get(self.ids[held.device], 0)
            for group in groups
            if held.start <= group.start < held.stop
        )
        return self.stage_bytes(held) + max(LEAST_EDGE_BYTES, 2.0 * chunk_bytes) * arriving

    def ends(self, row: Sequence[HeldRange]) -> list[float]:
        """By stage of a pipeline that runs alone, when its last backward ends."""
        given = self._simulation(row)
        boundaries = given.boundaries
        if not any(x.shared for pair in boundaries for x in (pair.forward, pair.backward)):
            return last_backward_ends(
                given.microbatches,
                given.in_flight,
                [stage.forward_s for stage in given.stages],
                [stage.backward_s for stage in given.stages],
                ahead=[(x.forward.link_s, x.forward.latency_s) for x in boundaries],
                back=[(x.backward.link_s, x.backward.latency_s) for x in boundaries],
            )
        done = [0.0] * len(row)
        for span in given.simulate(trace=True).trace:
            if span.kind == BACKWARD:
                done[span.stage] = max(done[span.stage], span.end_s)
        return done

    def _simulation(self, row: Sequence[HeldRange]) -> SimulationInput:
        return SimulationInput(
            schedule=self.problem.schedule,
            microbatches=row[0].microbatches,
            in_flight=tuple(held.in_flight for held in row),
            deferred_weights=(0,) * len(row),
            stages=tuple(self.stage_times(held) for held in row),
            boundaries=tuple(self._boundary(a, b) for a, b in pairwise(row)),
        )

    def _boundary(self, a: HeldRange, b: HeldRange) -> BoundaryTimes:
        size = self.problem.layers[a.stop - 1].output_bytes
        return BoundaryTimes(self.hop(a.device, b.device, size), self.hop(b.device, a.device, size))

    def hop(self, source: int, target: int, size: float) -> MessageTimes:
        ends = (self.ids[source], self.ids[target])
        link = self.data.links.get(ends)
        size *= 1.0 if link is None else link.sent_share
        also = tuple((number, size / rate) for number, rate in self._shared.get(ends, {}).items())
        if link is None:
            return MessageTimes(shared=also)
        return MessageTimes(size / link.bandwidth_bytes_per_s, link.latency_s, also)

    def groups(self, rows: Rows) -> list[tuple[int, int, list[str]]]:
        """(start, stop, devices in the problem's order) of every largest range that the same ones hold."""
        cuts = sorted({held.start for row in rows for held in row})
        out = []
        for start, stop in pairwise([*cuts, len(self.problem.layers)]):
            devices = sorted(held.device for row in rows for held in row if held.start <= start < held.stop)
            out.append((start, stop, [self.ids[d] for d in devices]))
        return out

    def chosen_trees(self, start: int, stop: int, devices: Sequence[str]) -> Trees:
        """The ring or star in which the group's bytes take least, alone; of equal ones the first."""
        size = math.fsum(self.data.sizes[start:stop])
        layouts = list(ring_and_stars(devices, self.problem.sync))
        spent_s = [size * self.data.byte_s(x, devices) + self.data.latency_s(x) for x in layouts]
        return layouts[spent_s.index(min(spent_s))]

    def play(self, rows: Rows, groups: Sequence[SummedRange]) -> HybridTimes:
        """The step: pipelines run side by side, layers are summed as they are released, all optimize."""
        found = ends_together([self._simulation(row) for row in rows], [self.ends(row) for row in rows])
        ends = dict(zip(chain.from_iterable(rows), chain.from_iterable(found), strict=True))
        if self.data.delayed:
            return self._play_delayed(ends, groups)
        done_s = max([*ends.values(), *self._line_ends(ends, groups), *self._processor_ends(ends, groups)])
        done_s += max((self.data.latency_s(group.trees) for group in groups), default=0.0)
        optimizers = [self.optimizer_s(held) for held in ends]
        compute_s = []
        for held, optimizer_s in zip(ends, optimizers, strict=True):
            compute_s.append(self.computes_s(held) + optimizer_s)
        return HybridTimes(done_s + max(optimizers), done_s - max(ends.values()), tuple(compute_s))

    def computes_s(self, held: HeldRange) -> float:
        """Its forwards and backwards of a step."""
        times = self.stage_times(held)
        return held.microbatches * (times.forward_s + times.backward_s)

    def _play_delayed(self, ends: dict[HeldRange, float], groups: Sequence[SummedRange]) -> HybridTimes:
        """The step beside which the sums of the step before are made: the longest of either."""
        afterwards = {
            held: self.optimizer_s(held) + busy_s for held, busy_s in self._processors_s(ends, groups)
        }
        ready_s = max(end_s + afterwards[held] for held, end_s in ends.items())
        waiting: dict[object, list[tuple[float, int, float]]] = {}
        begun: dict[int, float] = {}
        for group in groups:
            begun[group.start] = max(
                end_s for held, end_s in ends.items() if held.start <= group.start < held.stop
            )
            size = math.fsum(self.data.sizes[group.start : group.stop])
            for what, byte_s in self._used_s(group.trees).items():
                waiting.setdefault(what, []).append((begun[group.start], -group.start, size * byte_s))
        last = dict(begun)
        longest_s = 0.0
        for served in waiting.values():
            free_s = -math.inf
            for at_s, place, spent_s in sorted(served):
                free_s = max(free_s, at_s) + spent_s
                last[-place] = max(last[-place], free_s)
            longest_s = max(longest_s, math.fsum(spent_s for _, _, spent_s in served))
        for group in groups:
            sum_s = last[group.start] - begun[group.start] + self.data.latency_s(group.trees)
            longest_s = max(longest_s, sum_s)
        compute_s = tuple(self.computes_s(held) + afterwards[held] for held in ends)
        return HybridTimes(max(ready_s, longest_s), max(0.0, longest_s - ready_s), compute_s)

    def released_s(self, held: HeldRange, end_s: float, layer: int) -> float:
        """When a holder has a layer's gradients."""
        return end_s - math.fsum(self.columns[held.device][1][held.start : layer])

    def _used_s(self, trees: Trees) -> dict[object, float]:
        """By link and shared resource, seconds that a byte takes there over all trees."""
        sent: dict[tuple[str, str], float] = {}
        for tree in trees:
            for edge in (*tree.up, *tree.down):
                sent[edge] = sent.get(edge, 0.0) + tree.share
        used: dict[object, float] = {
            edge: n / self.data.links[edge].bandwidth_bytes_per_s
            for edge, n in sent.items()
            if edge in self.data.links
        }
        for edge, n in sent.items():
            for number, rate in self._shared.get(edge, {}).items():
                used[number] = used.get(number, 0.0) + n / rate
        return used

    def _line_ends(self, ends: dict[HeldRange, float], groups: Sequence[SummedRange]) -> list[float]:
        """When each link and shared resource that is used has served all layers."""
        waiting: dict[object, list[tuple[float, int, float]]] = {}
        for group in groups:
            used = self._used_s(group.trees)
            holders = [held for held in ends if held.start <= group.start < held.stop]
            sizes = self.data.format.late(group.start, group.stop)
            for layer, size in enumerate(sizes, group.start):
                at_s = max(self.released_s(held, ends[held], layer) for held in holders)
                for what, byte_s in used.items():
                    waiting.setdefault(what, []).append((at_s, -layer, size * byte_s))
        out = []
        for served in waiting.values():
            free_s = -math.inf
            for at_s, _, spent_s in sorted(served):
                free_s = max(free_s, at_s) + spent_s
            out.append(free_s)
        return out

    def _processor_ends(self, ends: dict[HeldRange, float], groups: Sequence[SummedRange]) -> list[float]:
        """When each holder's processor has added and passed on all bytes after its stage."""
        return [ends[held] + spent_s for held, spent_s in self._processors_s(ends, groups)]

    def _processors_s(
        self, ends: dict[HeldRange, float], groups: Sequence[SummedRange]
    ) -> list[tuple[HeldRange, float]]:
        """By holder, its processor's seconds for the bytes of all its groups."""
        named = {entry.id for entry in self.problem.devices}
        factor = self.data.message_factor(max(self.data.byte_s(group.trees, named) for group in groups))
        out = []
        for held in ends:
            entry = self.problem.devices[held.device]
            spent = [
                self.data.processor_byte_s(entry, group.trees, factor)
                * math.fsum(self.data.sizes[group.start : group.stop])
                for group in groups
                if held.start <= group.start < held.stop
            ]
            out.append((held, math.fsum(spent)))
        return out
