"""The simulator's input for one plan, so that the plan can be simulated again with other times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from skyctl.schedule.actions import BACKWARD, FORWARD
from skyctl.schedule.simulation import ActionSpan, SimulatedStep, simulate
from skyctl.schedule.step_times import BoundaryTimes, StageTimes


@dataclass(frozen=True)
class SimulationInput:
    """The arguments of ``simulate``: one entry per stage, ``boundaries`` one less.

    ``overhead_s``: by stage, the part of each forward and each backward that is not spent in the layers
    (empty: none).
    """

    schedule: str
    microbatches: int
    in_flight: tuple[int, ...]
    deferred_weights: tuple[int, ...]
    stages: tuple[StageTimes, ...]
    boundaries: tuple[BoundaryTimes, ...]
    overhead_s: tuple[float, ...] = ()

    def layer_times(self, stage: int) -> StageTimes:
        """A stage's times without its overhead."""
        times, overhead_s = self.stages[stage], self.stage_overhead_s(stage)
        forward_s, backward_s = times.forward_s - overhead_s, times.backward_s - overhead_s
        return replace(times, forward_s=forward_s, backward_s=backward_s)

    def stage_overhead_s(self, stage: int) -> float:
        """Seconds of a stage's forward, and of its backward, that are not spent in its layers."""
        return self.overhead_s[stage] if self.overhead_s else 0.0

    def simulate(self, *, trace: bool = False) -> SimulatedStep:
        """Simulates one step; ``trace``: with every action's start and end."""
        return simulate(
            self.schedule,
            self.microbatches,
            self.in_flight,
            self.stages,
            self.boundaries,
            trace=trace,
            deferred_weights=self.deferred_weights,
        )


class StageWait(NamedTuple):
    """One wait for an action's input: until ``sent_s`` for the sending stage, then for the network."""

    stage: int
    microbatch: int
    start_s: float
    sent_s: float
    end_s: float


def find_waits(simulation: SimulatedStep) -> list[StageWait]:
    """All waits of the stages in a traced simulation, by stage and time.

    Counted as the worker counts them: idle until the message is sent, transfer from then on. A message that
    queues on its link counts as being transferred.
    """
    ends = {(span.stage, span.kind, span.microbatch): span.end_s for span in simulation.trace}
    by_stage: dict[int, list[ActionSpan]] = {}
    for span in simulation.trace:
        by_stage.setdefault(span.stage, []).append(span)
    out = []
    for stage, spans in sorted(by_stage.items()):
        spans.sort(key=lambda span: (span.start_s, span.end_s))
        free_s = 0.0
        for before, span in pairwise([ActionSpan(stage, "", 0, 0.0, 0.0), *spans]):
            free_s = max(free_s, before.end_s)
            if span.start_s > free_s and span.kind in (FORWARD, BACKWARD):
                sender = stage - 1 if span.kind == FORWARD else stage + 1
                ready_s = ends.get((sender, span.kind, span.microbatch), free_s)
                sent_s = min(max(free_s, ready_s), span.start_s)
                out.append(StageWait(stage, span.microbatch, free_s, sent_s, span.start_s))
    return out
