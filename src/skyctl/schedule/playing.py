"""One plan as the simulator is given it, so that it can be played again with other times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from skyctl.schedule.actions import BACKWARD, FORWARD
from skyctl.schedule.simulate import Boundary, Simulation, Span, StageTimes, simulate


@dataclass(frozen=True)
class Play:
    """``simulate``'s arguments; one entry a stage, ``boundaries`` one less.

    ``beside_s``: of each forward and each backward in ``stages``, what is not the layers' (default: nothing).
    """

    schedule: str
    microbatches: int
    in_flight: tuple[int, ...]
    weights_behind: tuple[int, ...]
    stages: tuple[StageTimes, ...]
    boundaries: tuple[Boundary, ...]
    beside_s: tuple[float, ...] = ()

    def layers(self, stage: int) -> StageTimes:
        """A stage's times without what is beside its layers."""
        times, beside_s = self.stages[stage], self.beside(stage)
        forward_s, backward_s = times.forward_s - beside_s, times.backward_s - beside_s
        return replace(times, forward_s=forward_s, backward_s=backward_s)

    def beside(self, stage: int) -> float:
        """Seconds of a stage's forward, and of its backward, beside its layers."""
        return self.beside_s[stage] if self.beside_s else 0.0

    def simulate(self, *, trace: bool = False) -> Simulation:
        """One step."""
        return simulate(
            self.schedule,
            self.microbatches,
            self.in_flight,
            self.stages,
            self.boundaries,
            trace=trace,
            weights_behind=self.weights_behind,
        )


class Wait(NamedTuple):
    """A stage waits for an action's input: until ``sent_s`` for its sender, then for the network."""

    stage: int
    microbatch: int
    start_s: float
    sent_s: float
    end_s: float


def waits(simulation: Simulation) -> list[Wait]:
    """What stages wait for in a simulated step that was traced.

    As the worker counts it: idle while the message has not set out, transfer from there. One that queues
    behind others on its link counts as on its way.
    """
    ends = {(span.stage, span.kind, span.microbatch): span.end_s for span in simulation.trace}
    by_stage: dict[int, list[Span]] = {}
    for span in simulation.trace:
        by_stage.setdefault(span.stage, []).append(span)
    out = []
    for stage, spans in sorted(by_stage.items()):
        spans.sort(key=lambda span: (span.start_s, span.end_s))
        free_s = 0.0
        for before, span in pairwise([Span(stage, "", 0, 0.0, 0.0), *spans]):
            free_s = max(free_s, before.end_s)
            if span.start_s > free_s and span.kind in (FORWARD, BACKWARD):
                sender = stage - 1 if span.kind == FORWARD else stage + 1
                ready_s = ends.get((sender, span.kind, span.microbatch), free_s)
                sent_s = min(max(free_s, ready_s), span.start_s)
                out.append(Wait(stage, span.microbatch, free_s, sent_s, span.start_s))
    return out
