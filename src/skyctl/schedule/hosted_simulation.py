"""A step whose stages ask hosts of experts in the middle of their forwards and backwards, played by events.

Pipelines play their schedules' actions as in ``simulation``, but all of them ask the same hosts. A host does
what it is asked in the order in which it arrives, one thing after the other. A stage waits for all hosts that
it has asked. Between two stages, messages take their unqueued time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from skyctl.schedule.actions import BACKWARD, FORWARD, actions
from skyctl.schedule.simulation_input import SimulationInput


@dataclass(frozen=True)
class HostAsk:
    """The work that a stage asks of a host at once.

    ``way_s``: seconds there and back; ``busy_s``: the host's own.
    """

    host: int
    busy_s: float
    way_s: float = 0.0


@dataclass(frozen=True)
class HostedPass:
    """A stage's forward or backward of a microbatch.

    Attributes:
        work_s: the stage's own seconds before each of its asks, and after the last one.
        asks: each with all hosts that are asked at once.
    """

    work_s: tuple[float, ...]
    asks: tuple[tuple[HostAsk, ...], ...] = ()


@dataclass(frozen=True)
class HostedStage:
    """The work of a stage, and its asks of hosts, in its forward and in its backward of a microbatch."""

    forward: HostedPass
    backward: HostedPass


@dataclass(frozen=True)
class HostedEnds:
    """Of one pipeline, by stage: when its last action ends, and the seconds of all its actions."""

    ended_s: tuple[float, ...]
    busy_s: tuple[float, ...]


def play_hosted(
    pipelines: Sequence[SimulationInput], stages: Sequence[Sequence[HostedStage]], hosts: int
) -> list[HostedEnds]:
    """Plays a step.

    Args:
        pipelines: their schedules and messages; the stages' own times are in ``stages``, by pipeline.
        hosts: how many there are.
    """
    return _Player(pipelines, stages, hosts).play()


class _Stage:
    """A stage while it is played: its next action, and what has arrived there."""

    def __init__(self, times: HostedStage, order: Sequence[tuple[str, int]], *, is_first: bool) -> None:
        self.times, self.order = times, order
        self.arrived = {(FORWARD, m) for _, m in order} if is_first else set()
        self.next = 0
        self.is_free = True
        self.ended_s = self.busy_s = 0.0


class _Player:
    def __init__(
        self, pipelines: Sequence[SimulationInput], stages: Sequence[Sequence[HostedStage]], hosts: int
    ) -> None:
        self._pipelines = pipelines
        self._host_free_s = [0.0] * hosts
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._stages = [
            [
                _Stage(times, actions(p.schedule, p.microbatches, k), is_first=s == 0)
                for s, (times, k) in enumerate(zip(own, p.in_flight, strict=True))
            ]
            for p, own in zip(pipelines, stages, strict=True)
        ]
        for own in self._stages:  # the last stage's gradients come from its own loss
            own[-1].arrived |= {(BACKWARD, m) for _, m in own[-1].order}

    def play(self) -> list[HostedEnds]:
        for p, own in enumerate(self._stages):
            for s in range(len(own)):
                self._go_on(p, s, 0.0)
        while self._events:
            now_s, _, happens = heapq.heappop(self._events)
            happens(now_s)
        return [
            HostedEnds(tuple(stage.ended_s for stage in own), tuple(stage.busy_s for stage in own))
            for own in self._stages
        ]

    def _at(self, time_s: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happens))

    def _go_on(self, p: int, s: int, now_s: float) -> None:
        """The stage's next action, if it is free and the input has arrived."""
        stage = self._stages[p][s]
        if not stage.is_free or stage.next == len(stage.order):
            return
        kind, microbatch = stage.order[stage.next]
        if (kind, microbatch) not in stage.arrived:
            return
        stage.is_free = False
        done = stage.times.forward if kind == FORWARD else stage.times.backward

        def work(part: int, begin_s: float) -> None:
            end_s = begin_s + done.work_s[part]
            if part == len(done.asks):
                self._at(end_s, lambda at_s: self._end(p, s, now_s, at_s))
            else:
                self._at(end_s, lambda at_s: ask(part, at_s))

        def ask(part: int, at_s: float) -> None:
            ends_s = [at_s]
            for asked in done.asks[part]:
                begin_s = max(at_s + asked.way_s / 2, self._host_free_s[asked.host])
                self._host_free_s[asked.host] = begin_s + asked.busy_s
                ends_s.append(begin_s + asked.busy_s + asked.way_s / 2)
            self._at(max(ends_s), lambda then_s: work(part + 1, then_s))

        work(0, now_s)

    def _end(self, p: int, s: int, began_s: float, now_s: float) -> None:
        """An action of a stage has ended."""
        stage, boundaries = self._stages[p][s], self._pipelines[p].boundaries
        kind, microbatch = stage.order[stage.next]
        stage.next, stage.is_free = stage.next + 1, True
        stage.ended_s, stage.busy_s = now_s, stage.busy_s + now_s - began_s
        if kind == FORWARD and s < len(boundaries):
            self._send(p, s + 1, (kind, microbatch), now_s + boundaries[s].forward.unqueued_s)
        elif kind == BACKWARD and s:
            self._send(p, s - 1, (kind, microbatch), now_s + boundaries[s - 1].backward.unqueued_s)
        self._go_on(p, s, now_s)

    def _send(self, p: int, s: int, message: tuple[str, int], arrives_s: float) -> None:
        def arrive(now_s: float) -> None:
            self._stages[p][s].arrived.add(message)
            self._go_on(p, s, now_s)

        self._at(arrives_s, arrive)
