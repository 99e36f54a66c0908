"""Simulates one step of a schedule, by the contract's model of time (``docs/contract.md``, Time).

An action starts when the one before it on its device has ended and its input has arrived. The output of a
stage's last layer goes forward, and as many bytes come back as gradient. Links and devices work at the same
time; a device's optimizer runs after its last backward; the step ends with the last action.

How "first come first served" is read here: messages are taken in the order of the time they become ready,
which is when the action that made them ends; where two are ready at once, the lower stage's first, then a
forward before a backward. A message starts when its directed link and every shared resource that names that
link are free, having served all messages taken before; it occupies each of them from that start for
bytes / that one's own bandwidth, is sent when the last of these ends, and arrives ``latency_s`` (the link's)
later. A link that is not given is free and instant, but a shared resource naming the pair still holds.

Without shared resources a step is one pass over a fixed order (``recurrence.py``), with them a
discrete-event simulation (``event_simulation.py``). Of steps with thousands of microbatches only what does
not repeat is played (``steady_state.py``), unless every action is asked for. Weight gradients
(``zero-bubble``) send nothing and wait for nothing: they only keep their device busy for longer after a
backward, or at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from skyctl.schedule.actions import (
    BACKWARD,
    EAGER,
    FORWARD,
    OPTIMIZER,
    WEIGHT_GRADIENTS,
    ZERO_BUBBLE,
    Action,
    actions,
    check_order,
)
from skyctl.schedule.event_simulation import play_events
from skyctl.schedule.recurrence import PlayedStep, play_recurrence
from skyctl.schedule.steady_state import WHOLE_STEP, periodic_ends, straight_ends
from skyctl.schedule.step_times import BoundaryTimes, MessageTimes, StageTimes


class ActionSpan(NamedTuple):
    """When one action ran. ``kind``: F, B, W or O (optimizer, microbatch 0); W and O only where they take
    time."""

    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """One simulated step. ``compute_s``: busy seconds by stage, optimizer included; ``idle_s``: the rest of
    the step; ``trace``: every action by start, if asked for; ``ended_s``: by stage, when its last action but
    the optimizer ends."""

    iteration_s: float
    compute_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    trace: tuple[ActionSpan, ...] = ()
    ended_s: tuple[float, ...] = ()


def simulate(
    schedule: str,
    microbatches: int,
    in_flight: Sequence[int],
    stages: Sequence[StageTimes],
    boundaries: Sequence[BoundaryTimes],
    *,
    trace: bool = False,
    deferred_weights: Sequence[int] | None = None,
) -> SimulatedStep:
    """Simulates one step.

    Args:
        schedule: its name; with ``in_flight`` (one number per stage) it gives every stage's order.
        stages: one entry per stage.
        boundaries: one entry between each two neighbours, so one less.
        trace: also return every action's start and end.
        deferred_weights: under ``zero-bubble``, one number per stage (default: 0 each).

    Raises:
        ValueError: lengths that do not match, or orders that wait for each other for ever.
    """
    count = len(stages)
    deferred = [0] * count if deferred_weights is None else list(deferred_weights)
    if len(in_flight) != count or len(boundaries) != count - 1 or len(deferred) != count:
        raise ValueError(
            f"{count} stages, {len(in_flight)} in-flight numbers, {len(boundaries)} boundaries"
            f"{'' if deferred_weights is None else f', {len(deferred)} deferred_weights'}"
        )
    for numbers in zip(in_flight, deferred, strict=True):
        check_order(schedule, microbatches, *numbers)
    if schedule != ZERO_BUBBLE:
        stages = [stage if not stage.weight_s else replace(stage, weight_s=0.0) for stage in stages]
    pipeline = _Pipeline(schedule, tuple(in_flight), tuple(deferred), tuple(stages), tuple(boundaries))
    spans: list[ActionSpan] = []
    if trace:
        played = pipeline.play(microbatches)
        done = played.free
        spans = [span for s in range(count) for span in pipeline.spans(s, played, microbatches)]
    else:
        done = pipeline.ends(microbatches)
    ends = [at + stage.optimizer_s for at, stage in zip(done, stages, strict=True)]
    iteration_s = max(ends)
    if trace:
        spans.extend(
            ActionSpan(s, OPTIMIZER, 0, done[s], ends[s]) for s in range(count) if stages[s].optimizer_s > 0
        )
        spans.sort(key=itemgetter(3, 4, 0))  # by start, end, stage
    compute = tuple(microbatches * (s.forward_s + s.backward_s) + s.optimizer_s for s in stages)
    idle = tuple(max(0.0, iteration_s - busy) for busy in compute)
    return SimulatedStep(iteration_s, compute, idle, tuple(spans), tuple(done))


def last_backward_ends(
    microbatches: int,
    in_flight: tuple[int, ...],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    ahead: Sequence[tuple[float, float]],
    back: Sequence[tuple[float, float]],
    weight_s: Sequence[float] | None = None,
    deferred_weights: Sequence[int] | None = None,
) -> list[float]:
    """When each stage's last action but the optimizer ends, without shared resources: fast, for searches.

    Args:
        ahead: by boundary, (link seconds, latency seconds) of a forward message; ``back``: of a backward one.
        weight_s: under ``zero-bubble``, the part of ``backward_s`` that its W takes. None: no W.
        deferred_weights: under ``zero-bubble``, one number per stage (default: 0 each).
    """
    whole = microbatches <= WHOLE_STEP
    if not whole and weight_s is None and min(in_flight) == microbatches:
        stages = tuple(StageTimes(f, b) for f, b in zip(forward_s, backward_s, strict=True))
        links = zip(ahead, back, strict=True)
        boundaries = tuple(BoundaryTimes(MessageTimes(*to), MessageTimes(*fro)) for to, fro in links)
        none = (0,) * len(stages)
        return _Pipeline(EAGER, in_flight, none, stages, boundaries).ends(microbatches)
    weights = None
    if weight_s is not None:
        backward_s = [both - part for both, part in zip(backward_s, weight_s, strict=True)]
        weights = weight_s, [0] * len(in_flight) if deferred_weights is None else deferred_weights
    played = play_recurrence(
        microbatches, in_flight, forward_s, backward_s, weights, ahead, back, whole=whole
    )
    return played.free


@dataclass(frozen=True)
class _Pipeline:
    """The pipeline that is simulated, for any number of microbatches from its numbers in flight on."""

    schedule: str
    in_flight: tuple[int, ...]
    deferred: tuple[int, ...]
    stages: tuple[StageTimes, ...]
    boundaries: tuple[BoundaryTimes, ...]

    @cached_property
    def shares(self) -> bool:
        """Whether any message occupies a shared resource."""
        return any(x.shared for boundary in self.boundaries for x in (boundary.forward, boundary.backward))

    def ends(self, microbatches: int) -> list[float]:
        """When each stage's last action but the optimizer ends, in seconds."""
        if self.shares:
            if microbatches <= WHOLE_STEP:
                return self.play(microbatches).free
            depth = max(*self.in_flight, *self.deferred)
            return periodic_ends(lambda m: self.play(m).free, self._series, microbatches, depth)
        whole = microbatches <= WHOLE_STEP
        if not whole and min(self.in_flight) == microbatches and not any(x.weight_s for x in self.stages):
            return straight_ends(self._all_in_flight, self._growth_s(), microbatches)
        return self.play(microbatches, whole=whole).free

    def play(self, microbatches: int, *, whole: bool = True) -> PlayedStep:
        """A step with that many microbatches; all actions and messages, or (not ``whole``) only its end."""
        if self.shares:
            orders = [self._order(s, microbatches) for s in range(len(self.stages))]
            return play_events(orders, self.stages, self.boundaries)
        weight_s = [stage.weight_s for stage in self.stages]
        return play_recurrence(
            microbatches,
            self.in_flight,
            [stage.forward_s for stage in self.stages],
            [stage.backward_s - stage.weight_s for stage in self.stages],
            (weight_s, self.deferred) if any(weight_s) else None,
            [(boundary.forward.link_s, boundary.forward.latency_s) for boundary in self.boundaries],
            [(boundary.backward.link_s, boundary.backward.latency_s) for boundary in self.boundaries],
            whole=whole,
        )

    def _all_in_flight(self, microbatches: int) -> list[float]:
        """``ends`` of a step with that many microbatches, all of them in flight."""
        return replace(self, in_flight=(microbatches,) * len(self.stages)).play(microbatches).free

    def _growth_s(self) -> list[float]:
        """By stage, the slowest forward or activation and the slowest backward or gradient from there on."""
        ahead_s = [boundary.forward.link_s for boundary in self.boundaries]
        back_s = [*(boundary.backward.link_s for boundary in self.boundaries), 0.0]
        forward_s = max([*ahead_s, *(stage.forward_s for stage in self.stages)])
        slowest = 0.0
        out: list[float] = []
        for stage, gradient_s in zip(reversed(self.stages), reversed(back_s), strict=True):
            slowest = max(slowest, stage.backward_s, gradient_s)
            out.insert(0, forward_s + slowest)
        return out

    def _order(self, stage: int, microbatches: int) -> list[Action]:
        return actions(self.schedule, microbatches, self.in_flight[stage], self.deferred[stage])

    def spans(self, stage: int, played: PlayedStep, microbatches: int) -> Iterator[ActionSpan]:
        """When the actions of one stage ran in a step that was played, in their order."""
        times = self.stages[stage]
        free = 0.0
        for kind, m in self._order(stage, microbatches):
            if kind == FORWARD:
                arrived, seconds = played.inputs[stage][m] if stage else 0.0, times.forward_s
            elif kind == BACKWARD:
                arrived = played.gradients[stage][m] if stage + 1 < len(self.stages) else 0.0
                seconds = times.backward_s - times.weight_s
            else:
                arrived, seconds = free, times.weight_s
            begin = arrived if arrived > free else free
            free = begin + seconds
            if kind != WEIGHT_GRADIENTS or seconds > 0:
                yield ActionSpan(stage, kind, m, begin, free)

    def _series(self, microbatches: int) -> list[list[float]]:
        """By stage, when its forwards and backwards end, and when what they wait for arrives.

        Entry n of each list is of the n-th backward, or of the last forward before it.
        """
        played = self.play(microbatches)
        out: list[list[float]] = []
        for s, k in enumerate(self.in_flight):
            spans = list(self.spans(s, played, microbatches))
            out.append([span.end_s for span in spans if span.kind == FORWARD][k - 1 :])
            out.append([span.end_s for span in spans if span.kind == BACKWARD])
            out += [played.inputs[s][k - 1 :]] if s else []
            out += [played.gradients[s]] if s + 1 < len(self.stages) else []
        return out
