"""A candidate of several pipelines, each with cuts of its own: whether it fits, and what a step takes.

The model is the contract's (``docs/contract.md``, Hybrids). Devices are indices in the problem's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.data.data_placement import processor_byte_s
from skyctl.planner.data.holder_costs import (
    SCHEDULES,
    DataModel,
    buffer_bytes,
    message_factor,
    require_delayed_format,
)
from skyctl.planner.data.route_layouts import DeviceRoute
from skyctl.planner.data.summed_bytes import summed_bytes, with_added_work
from skyctl.planner.evaluation import StageExecution, least_execution, simulation_input, stage_ends_s
from skyctl.planner.hybrid.joint_sum import (
    GroupRoutes,
    SumGroup,
    SumRoutes,
    last_sum_s,
    layer_groups,
    loads_of,
    longest_sum_s,
    released_s,
)
from skyctl.records.problem import Problem
from skyctl.schedule.joint_simulation import ends_together
from skyctl.schedule.simulation_input import SimulationInput


def require_hybrid_problem(problem: Problem) -> None:
    """Raises InputError where the problem asks for what several pipelines do not have."""
    if problem.schedule not in SCHEDULES:
        raise InputError(
            f"schedule {problem.schedule!r} is not played with several pipelines, whose stages run as in "
            "1f1b",
            hint="--schedule 1f1b goes with --parallel hybrid (or leave it out)",
        )
    if problem.objective != "iteration":
        raise InputError(
            f"objective {problem.objective!r} looks at one pipeline's slowest stage; --parallel hybrid has "
            "several pipelines",
            hint="--objective iteration",
        )
    if problem.sync in ("trees", "server"):
        raise InputError(
            f"sync {problem.sync!r} is for devices that hold all layers; pipelines sum in rings and stars",
            hint="--sync auto, ring or star goes with --parallel hybrid",
        )
    if problem.helpers:
        raise InputError(
            f"pipelines sum over the devices that hold the layers, so {problem.helpers[0]} can't help there",
            hint="leave --helper out, or --parallel data",
        )
    require_delayed_format(problem)


class Candidate(NamedTuple):
    """Pipelines over disjoint devices, and how many of the step's microbatches go through each."""

    placements: tuple[Placement, ...]
    shares: tuple[int, ...]


class TimeScale(NamedTuple):
    """What times are multiplied by: of a device's layers and its work on gradients, of a link's seconds."""

    device: Callable[[int], float]
    link: Callable[[tuple[int, int]], float]


AS_MEASURED = TimeScale(lambda _device: 1.0, lambda _pair: 1.0)
"""Times as the problem has them."""


class PipelinePlay(NamedTuple):
    """A pipeline with its share of the microbatches, played alone or beside others (``together``).

    Attributes:
        ends_s: by stage, when its last backward ends.
        need_bytes: by stage, what its device needs, reserved bytes and buffers of sums left out.
        optimizer_s: by stage.
        floor_s: no step with this pipeline is shorter, whatever the others are.
    """

    execution: StageExecution
    ends_s: tuple[float, ...]
    need_bytes: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    floor_s: float

    @property
    def end_s(self) -> float:
        """When the last backward ends."""
        return max(self.ends_s)


@dataclass(frozen=True)
class HybridStep:
    """What a step of a candidate takes.

    Attributes:
        groups: how gradients are summed, by ranges of layers.
        sync_s: seconds from the last backward of all to the last byte of the sums, latency included; with a
            delay, what the step is longer for waiting for sums.
        busy_s: with a delay, by device, its processor's seconds for sums that count as computing.
    """

    candidate: Candidate
    plays: tuple[PipelinePlay, ...]
    groups: tuple[SumGroup, ...]
    iteration_s: float
    sync_s: float
    busy_s: Mapping[int, float] = field(default_factory=dict)


class HybridModel:
    """One problem of several pipelines as plain numbers, with the pipelines that were played.

    Attributes:
        base: costs with all microbatches; stages do not recompute.
        lines: gradients' bytes, links and shared resources.
        plays: how many pipelines were played.

    Raises:
        InputError: the problem asks for a schedule, an objective or sums that hybrids do not have.
    """

    def __init__(self, problem: Problem) -> None:
        require_hybrid_problem(problem)
        self.problem = problem
        plain = problem.model_copy(update={"recompute": False, "parallel": "pipeline"})
        self.base = CostModel(with_added_work(plain))
        self.lines = DataModel(plain)
        self.ids, self.layers, self.devices = self.base.ids, self.base.layers, self.base.devices
        self.microbatches = problem.microbatches
        self.sums = SumRoutes(self.lines)
        self.delayed = bool(problem.rhythm.delay)
        self._kept_bytes = [0.0]
        for size in summed_bytes(plain):
            self._kept_bytes.append(self._kept_bytes[-1] + size.kept)
        self._costs: dict[int, CostModel] = {self.microbatches: self.base}
        self._plays: dict[tuple[Placement, int], PipelinePlay | None] = {}
        self._inputs: dict[tuple[Placement, int, StageExecution], SimulationInput] = {}
        self._line_s = [self._lines_s(d) for d in range(self.devices)]

    @property
    def plays(self) -> int:
        """How many pipelines were looked at, each with a number of microbatches."""
        return len(self._plays)

    def _lines_s(self, device: int) -> list[float]:
        """Seconds of a byte over the fastest 1, 2, … of its lines at once, the slower of out and in."""
        others = [x for x in range(self.devices) if x != device]
        out: list[float] = [0.0] * self.layers
        for way in ([(device, x) for x in others], [(x, device) for x in others]):
            rate, fastest = 0.0, sorted(map(self._pair_byte_s, way))
            for count in range(self.layers):
                if count < len(fastest):
                    rate += 1 / fastest[count] if fastest[count] > 0 else math.inf
                out[count] = max(out[count], 1 / rate if rate else 0.0)
        return out

    def _pair_byte_s(self, pair: tuple[int, int]) -> float:
        shared = (byte_s for _, byte_s in self.lines.shared.get(pair, ()))
        return max((self.lines.byte_s.get(pair, 0.0), *shared))

    def costs(self, microbatches: int) -> CostModel:
        """The costs of a pipeline with that many microbatches."""
        if microbatches not in self._costs:
            self._costs[microbatches] = self.base.with_microbatches(microbatches)
        return self._costs[microbatches]

    def splits_tie(self, placement: Placement) -> bool:
        """Whether layers that share parameters lie in several stages."""
        return any(
            not any(start <= tie.layers[0] and tie.layers[-1] < stop for _, start, stop in placement)
            for tie in self.problem.ties
        )

    def play(self, placement: Placement, microbatches: int) -> PipelinePlay | None:
        """A pipeline by itself; None: memory, a pin or a tie does not allow it."""
        key = (placement, microbatches)
        if key not in self._plays:
            self._plays[key] = self._played(placement, microbatches)
        return self._plays[key]

    def _played(self, placement: Placement, microbatches: int) -> PipelinePlay | None:
        costs = self.costs(microbatches)
        if not costs.is_allowed(placement) or self.splits_tie(placement):
            return None
        play = self.play_as(placement, least_execution(costs, placement), microbatches)
        return play if self._fits(placement, play, {}) else None

    def play_as(self, placement: Placement, execution: StageExecution, microbatches: int) -> PipelinePlay:
        """A pipeline by itself, run so, whether it fits or not."""
        costs = self.costs(microbatches)
        ends = tuple(stage_ends_s(costs, placement, execution))
        needs = tuple(
            costs.need_bytes(p, q, k) + self._kept_bytes[q] - self._kept_bytes[p]
            for (_, p, q), k in zip(placement, execution.in_flight, strict=True)
        )
        optimizer_s = tuple(costs.optimizer_s.of(placement))
        if self.delayed:
            ready_s = max(end + one for end, one in zip(ends, optimizer_s, strict=True))
            floor_s = max(ready_s, *map(self._least_sum_s, placement))
        else:
            floor_s = max(map(self._last_byte_s, placement, ends)) + max(optimizer_s)
        return PipelinePlay(execution, ends, needs, optimizer_s, floor_s)

    def together(self, candidate: Candidate, plays: Sequence[PipelinePlay]) -> list[PipelinePlay]:
        """Played alone before, now side by side: their messages wait for each other on shared resources."""
        if not self.problem.shared:
            return list(plays)
        inputs = [
            self._input(placement, play.execution, share)
            for placement, share, play in zip(*candidate, plays, strict=True)
        ]
        found = ends_together(inputs, [play.ends_s for play in plays])
        return [play._replace(ends_s=ends) for play, ends in zip(plays, found, strict=True)]

    def _input(self, placement: Placement, execution: StageExecution, microbatches: int) -> SimulationInput:
        key = (placement, microbatches, execution)
        if key not in self._inputs:
            self._inputs[key] = simulation_input(self.costs(microbatches), placement, execution)
        return self._inputs[key]

    def _last_byte_s(self, stage: StageAssignment, end_s: float) -> float:
        """When the stage's gradients are summed at the earliest: n layers' bytes go over n lines at most."""
        line_s, sizes = self._line_s[stage.device], self.lines.layer_bytes
        before = self.base.backward_s[stage.device]
        at_s, size = end_s, 0.0
        for count, layer in enumerate(range(stage.start, stage.stop)):
            size += sizes[layer]
            sent_s = max(size * line_s[count], sizes[layer] * line_s[0])
            at_s = max(at_s, end_s + before[stage.start] - before[layer] + sent_s)
        return at_s

    def _least_sum_s(self, stage: StageAssignment) -> float:
        """What its gradients keep its lines busy for in a step, at least."""
        line_s, sizes = self._line_s[stage.device], self.lines.layer_bytes[stage.start : stage.stop]
        return max(math.fsum(sizes) * line_s[len(sizes) - 1], max(sizes) * line_s[0])

    def _fits(self, placement: Placement, play: PipelinePlay, children: dict[int, int]) -> bool:
        """Whether stages fit in memory with so many edges of sums arriving, by device."""
        room = self.base.available_bytes
        return all(
            need + buffer_bytes(children.get(stage.device, 0)) <= room[stage.device]
            for stage, need in zip(placement, play.need_bytes, strict=True)
        )

    def routed(
        self, start: int, stop: int, holders: tuple[int, ...], routes: Sequence[DeviceRoute]
    ) -> SumGroup:
        """A group with the routes that a plan's record has."""
        size = math.fsum(self.lines.layer_bytes[start:stop])
        return SumGroup(start, stop, holders, size, self.sums.of(routes))

    def step(self, candidate: Candidate, below_s: float = math.inf) -> HybridStep | None:
        """What a candidate's step takes over the fastest rings and stars.

        None: memory, a pin or a tie does not allow it, or it takes ``below_s`` or more.
        """
        plays: list[PipelinePlay] = []
        for placement, share in zip(*candidate, strict=True):
            play = self.play(placement, share)
            if play is None or play.floor_s >= below_s:
                return None
            plays.append(play)
        sizes = self.lines.layer_bytes
        groups = []
        for start, stop, holders in layer_groups(candidate.placements):
            size = math.fsum(sizes[start:stop])
            groups.append(SumGroup(start, stop, holders, size, self.sums.fastest(holders, size)))
        children = arriving_edges(group.routed for group in groups)
        fits = map(self._fits, candidate.placements, plays, [children] * len(plays))
        if not all(fits):
            return None
        if self.problem.shared and self.step_of(candidate, plays, groups).iteration_s >= below_s:
            return None  # side by side they take no less
        step = self.step_of(candidate, self.together(candidate, plays), groups)
        return step if step.iteration_s < below_s else None

    def step_of(
        self,
        candidate: Candidate,
        plays: Sequence[PipelinePlay],
        groups: Sequence[SumGroup],
        scale: TimeScale | None = None,
    ) -> HybridStep:
        """What a step takes with these plays and routes, whether it fits or not.

        ``scale``: plays' times are scaled already, those of the sums are to be.
        """
        if self.delayed:
            return self._delayed_step(candidate, plays, groups, scale)
        before = [[self._backward_s(stage.device, scale) for stage in x] for x in candidate.placements]
        released = released_s(candidate.placements, [play.ends_s for play in plays], before)
        loads = [
            group.routed.loads if scale is None else loads_of(self.lines, group.routed.use, scale.link)
            for group in groups
        ]
        late = [size for group in groups for size in self.lines.late_bytes(group.start, group.stop)]
        summed_s = last_sum_s(groups, loads, late, released)
        busy_s = self.processor_s(groups)
        last_s = max(play.end_s for play in plays)
        for placement, play in zip(candidate.placements, plays, strict=True):
            for stage, end_s in zip(placement, play.ends_s, strict=True):
                factor = 1.0 if scale is None else scale.device(stage.device)
                summed_s = max(summed_s, end_s + factor * busy_s.get(stage.device, 0.0))
        after_s = max(last_s, summed_s) + max(group.routed.use.latency_s for group in groups)
        iteration_s = after_s + max(max(play.optimizer_s) for play in plays)
        return HybridStep(candidate, tuple(plays), tuple(groups), iteration_s, after_s - last_s)

    def _delayed_step(
        self,
        candidate: Candidate,
        plays: Sequence[PipelinePlay],
        groups: Sequence[SumGroup],
        scale: TimeScale | None,
    ) -> HybridStep:
        """What a step takes beside which the sums of the step before are made."""
        busy_s = self.processor_s(groups)
        ends: dict[int, float] = {}
        ready_s = 0.0
        for placement, play in zip(candidate.placements, plays, strict=True):
            for stage, end_s, optimizer_s in zip(placement, play.ends_s, play.optimizer_s, strict=True):
                if scale is not None and stage.device in busy_s:
                    busy_s[stage.device] *= scale.device(stage.device)
                ends[stage.device] = end_s
                ready_s = max(ready_s, end_s + busy_s.get(stage.device, 0.0) + optimizer_s)
        loads = [
            group.routed.loads if scale is None else loads_of(self.lines, group.routed.use, scale.link)
            for group in groups
        ]
        iteration_s = max(ready_s, longest_sum_s(groups, loads, ends))
        parts = candidate, tuple(plays), tuple(groups)
        return HybridStep(*parts, iteration_s, iteration_s - ready_s, busy_s)

    def _backward_s(self, device: int, scale: TimeScale | None) -> list[float]:
        """Prefix sums of one backward on the device."""
        sums = self.base.backward_s[device]
        return sums if scale is None else [scale.device(device) * x for x in sums]

    def processor_s(self, groups: Sequence[SumGroup]) -> dict[int, float]:
        """By device, its processor's seconds for the sums of a step: adding, sending and receiving."""
        out: dict[int, float] = {}
        if not any(d.reduce_byte_s or d.message_byte_s for d in self.problem.devices):
            return out
        busiest_s = max(group.routed.byte_s for group in groups)
        factor = message_factor(self.problem, busiest_s)
        for group in groups:
            for d in group.holders:
                byte_s = processor_byte_s(self.lines, group.routed.use, d, factor)
                out[d] = out.get(d, 0.0) + byte_s * group.size_bytes
        return out


def arriving_edges(routed: Iterable[GroupRoutes]) -> dict[int, int]:
    """By device, the edges of all groups' routes that arrive at it with partial sums."""
    out: dict[int, int] = {}
    for one in routed:
        for d, count in one.use.children.items():
            out[d] = out.get(d, 0) + count
    return out
