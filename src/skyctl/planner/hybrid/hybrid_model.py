"""Hybrids as a search makes them: pipelines with their shares, played by themselves, then summed.

The model is the contract's (``docs/contract.md``, Hybrids). Devices are indices in the problem's order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from skyctl.planner.candidate import AS_MEASURED, Candidate, PlannedPipeline, arriving_edges, layer_groups
from skyctl.planner.cost_model import Placement, StageAssignment
from skyctl.planner.evaluation import least_execution
from skyctl.planner.fastest_groups import FastestGroups
from skyctl.planner.rhythms import Step, StepEnds
from skyctl.planner.step import play_alone, play_together, rhythm_of
from skyctl.planner.step_costs import StepCosts
from skyctl.planner.sum_costs import buffer_bytes
from skyctl.records.problem import Problem


class Draft(NamedTuple):
    """Pipelines over disjoint devices, and how many of the step's microbatches go through each.

    How they run and over which routes they sum follows from these.
    """

    placements: tuple[Placement, ...]
    shares: tuple[int, ...]


def draft_of(candidate: Candidate) -> Draft:
    """The draft that a candidate was made of."""
    return Draft(candidate.placements, candidate.shares)


class PipelinePlay(NamedTuple):
    """A pipeline with its share of the microbatches, played by itself.

    Attributes:
        need_bytes: by stage, what its device needs, reserved bytes and buffers of sums left out.
        floor_s: no step with this pipeline is shorter, whatever the others are.
    """

    pipeline: PlannedPipeline
    ends: StepEnds
    need_bytes: tuple[float, ...]
    floor_s: float


class HybridModel(StepCosts):
    """One problem of several pipelines as plain numbers, with the pipelines that were played.

    Attributes:
        plays: how many pipelines were looked at, each with a number of microbatches.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.sums = FastestGroups(self)
        self.delayed = bool(problem.rhythm.delay)
        self._plays: dict[tuple[Placement, int], PipelinePlay | None] = {}
        self._line_s = [self._lines_s(d) for d in range(self.devices)]

    @property
    def plays(self) -> int:
        """How many pipelines were looked at, each with a number of microbatches."""
        return len(self._plays)

    def _lines_s(self, device: int) -> list[float]:
        """Seconds of a byte over the fastest 1, 2, … of its lines at once, the slower of out and in."""
        others = np.delete(np.arange(self.devices), device)
        out: list[float] = [0.0] * self.layers
        for way in (self.line_table[device, others], self.line_table[others, device]):
            rate, fastest = 0.0, np.sort(way).tolist()
            for count in range(self.layers):
                if count < len(fastest):
                    rate += 1 / fastest[count] if fastest[count] > 0 else math.inf
                out[count] = max(out[count], 1 / rate if rate else 0.0)
        return out

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
        execution = least_execution(costs, placement)
        pipeline = PlannedPipeline(placement, execution, microbatches)
        ends = play_alone(self, pipeline)
        needs = tuple(
            costs.need_bytes(p, q, k) for (_, p, q), k in zip(placement, execution.in_flight, strict=True)
        )
        if self.delayed:
            floor_s = max(ends.optimized_s, *map(self._least_sum_s, placement))
        else:
            floor_s = max(map(self._last_byte_s, placement, ends.ends_s)) + max(ends.optimizer_s)
        return PipelinePlay(pipeline, ends, needs, floor_s)

    def _last_byte_s(self, stage: StageAssignment, end_s: float) -> float:
        """When the stage's gradients are summed at the earliest: n layers' bytes go over n lines at most."""
        line_s, sizes = self._line_s[stage.device], self.layer_bytes
        before = self.base.backward_s[stage.device]
        at_s, size = end_s, 0.0
        for count, layer in enumerate(range(stage.start, stage.stop)):
            size += sizes[layer]
            sent_s = max(size * line_s[count], sizes[layer] * line_s[0])
            at_s = max(at_s, end_s + before[stage.start] - before[layer] + sent_s)
        return at_s

    def _least_sum_s(self, stage: StageAssignment) -> float:
        """The least seconds of a step for which the stage's gradients keep its lines busy."""
        line_s, sizes = self._line_s[stage.device], self.layer_bytes[stage.start : stage.stop]
        return max(math.fsum(sizes) * line_s[len(sizes) - 1], max(sizes) * line_s[0])

    def _fits(self, play: PipelinePlay, children: dict[int, int]) -> bool:
        """Whether stages fit in memory with so many edges of sums arriving, by device."""
        room = self.base.available_bytes
        return all(
            need + buffer_bytes(children.get(stage.device, 0)) <= room[stage.device]
            for stage, need in zip(play.pipeline.placement, play.need_bytes, strict=True)
        )

    def step(self, draft: Draft, below_s: float = math.inf) -> Step | None:
        """The step of a draft over the fastest rings and stars.

        None: memory, a pin or a tie does not allow it, or it takes ``below_s`` or more.
        """
        plays: list[PipelinePlay] = []
        for placement, share in zip(*draft, strict=True):
            play = self.play(placement, share)
            if play is None or play.floor_s >= below_s:
                return None
            plays.append(play)
        groups = tuple(self.sums.group(*layers) for layers in layer_groups(draft.placements))
        children = arriving_edges(groups)
        if not all(self._fits(play, children) for play in plays):
            return None
        candidate = Candidate(tuple(play.pipeline for play in plays), groups)
        alone = [play.ends for play in plays]
        if self.problem.shared:
            apart = rhythm_of(self.problem, candidate)(self, candidate, alone, AS_MEASURED)
            if apart.iteration_s >= below_s:
                return None  # side by side they take no less
        step = play_together(self, candidate, alone)
        return step if step.iteration_s < below_s else None
