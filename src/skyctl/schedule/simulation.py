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

Without shared resources every directed link serves one boundary in one direction, in microbatch order, so
the whole step is one pass over an order that depends on no time (max-plus recurrence, cached per shape).
With shared resources it is a discrete-event simulation. Weight gradients (``zero-bubble``) send nothing and
wait for nothing: they only keep their device busy for longer after a backward, or at the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
)


@dataclass(frozen=True)
class StageTimes:
    """Seconds on one stage's device: forward and backward per microbatch, optimizer once a step.

    ``weight_s``: the part of ``backward_s`` that ``zero-bubble`` defers: there B takes ``backward_s −
    weight_s`` and W ``weight_s``; under other schedules B takes ``backward_s``.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    weight_s: float = 0.0


@dataclass(frozen=True)
class MessageTimes:
    """One message over one boundary in one direction.

    ``link_s``: seconds it occupies its directed link. ``shared``: (resource, seconds) for each shared
    resource it occupies.
    """

    link_s: float = 0.0
    latency_s: float = 0.0
    shared: tuple[tuple[Hashable, float], ...] = ()


FREE_MESSAGE = MessageTimes()


@dataclass(frozen=True)
class BoundaryTimes:
    """The messages between stage s and s + 1: activations forward, gradients backward."""

    forward: MessageTimes = FREE_MESSAGE
    backward: MessageTimes = FREE_MESSAGE


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
    the step; ``trace``: every action by start, if asked for."""

    iteration_s: float
    compute_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    trace: tuple[ActionSpan, ...] = ()


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
    orders = [actions(schedule, microbatches, *numbers) for numbers in zip(in_flight, deferred, strict=True)]
    if schedule != ZERO_BUBBLE:
        stages = [stage if not stage.weight_s else replace(stage, weight_s=0.0) for stage in stages]
    spans: list[ActionSpan] | None = [] if trace else None
    if any(message.shared for boundary in boundaries for message in (boundary.forward, boundary.backward)):
        done = _simulate_events(orders, stages, boundaries, microbatches, spans)
    else:
        done = _simulate_recurrence(orders, tuple(in_flight), deferred, stages, boundaries, spans)
    ends = [at + stage.optimizer_s for at, stage in zip(done, stages, strict=True)]
    iteration_s = max(ends)
    if spans is not None:
        spans.extend(
            ActionSpan(s, OPTIMIZER, 0, done[s], ends[s]) for s in range(count) if stages[s].optimizer_s > 0
        )
        spans.sort(key=itemgetter(3, 4, 0))  # by start, end, stage
    compute = tuple(microbatches * (s.forward_s + s.backward_s) + s.optimizer_s for s in stages)
    idle = tuple(max(0.0, iteration_s - busy) for busy in compute)
    return SimulatedStep(iteration_s, compute, idle, tuple(spans or ()))


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
    if weight_s is None:
        return _recurrence(microbatches, in_flight, forward_s, backward_s, None, ahead, back)[0]
    input_s = [whole - part for whole, part in zip(backward_s, weight_s, strict=True)]
    deferred = [0] * len(in_flight) if deferred_weights is None else deferred_weights
    weights = weight_s, deferred
    return _recurrence(microbatches, in_flight, forward_s, input_s, weights, ahead, back)[0]


def _recurrence(
    microbatches: int,
    in_flight: tuple[int, ...],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weights: tuple[Sequence[float], Sequence[int]] | None,
    ahead: Sequence[tuple[float, float]],
    back: Sequence[tuple[float, float]],
) -> tuple[list[float], list[float], list[float]]:
    """(each stage's end, when inputs arrive, when gradients arrive at the previous stage).

    The last two are indexed by stage · microbatches + microbatch, with an input and a gradient of time 0 at
    the ends. ``weights``: seconds of a W and by how many microbatches it is deferred, by stage;
    ``backward_s`` is then of B alone.
    """
    count = len(forward_s)
    after: list[float] = []  # from a backward's end until the device is free
    for seconds, deferred in zip(*weights, strict=True) if weights is not None else ():
        after += [0.0] * deferred + [seconds] * (microbatches - deferred)
    free = [0.0] * count
    sent_ahead = [0.0] * count
    sent_back = [0.0] * count
    ahead_s = [x for x, _ in ahead] + [0.0]
    ahead_latency = [x for _, x in ahead] + [0.0]
    back_s = [0.0] + [x for x, _ in back]
    back_latency = [0.0] + [x for _, x in back]
    inputs = [0.0] * ((count + 1) * microbatches)
    gradients = [0.0] * ((count + 1) * microbatches)
    for is_forward, s, i in _order(microbatches, in_flight):
        at = free[s]
        if is_forward:
            arrived = inputs[i]
            at = (arrived if arrived > at else at) + forward_s[s]
            free[s] = at
            sent = sent_ahead[s]
            sent = (at if at > sent else sent) + ahead_s[s]
            sent_ahead[s] = sent
            inputs[i + microbatches] = sent + ahead_latency[s]
        else:
            arrived = gradients[i + microbatches]
            at = (arrived if arrived > at else at) + backward_s[s]
            free[s] = at + after[i] if after else at
            sent = sent_back[s]
            sent = (at if at > sent else sent) + back_s[s]
            sent_back[s] = sent
            gradients[i] = sent + back_latency[s]
    if weights is not None:
        free = [at + seconds * deferred for at, seconds, deferred in zip(free, *weights, strict=True)]
    return free, inputs, gradients


@lru_cache(maxsize=128)
def _order(microbatches: int, in_flight: tuple[int, ...]) -> tuple[tuple[bool, int, int], ...]:
    """All stages' forwards and backwards in one order in which every input comes before its use.

    Entries: (is forward, stage, stage · microbatches + microbatch). Cached: it depends on no time.
    """
    count = len(in_flight)
    orders = [actions(EAGER, microbatches, number) for number in in_flight]
    at = [0] * count
    forwards = [0] * count  # done, per stage
    backwards = [0] * count
    out: list[tuple[bool, int, int]] = []
    work = list(range(count - 1, -1, -1))
    while work:
        s = work.pop()
        order = orders[s]
        before = at[s]
        while at[s] < len(order):
            kind, m = order[at[s]]
            if kind == FORWARD:
                if s and forwards[s - 1] <= m:
                    break
                forwards[s] = m + 1
            else:
                if s < count - 1 and backwards[s + 1] <= m:
                    break
                backwards[s] = m + 1
            out.append((kind == FORWARD, s, s * microbatches + m))
            at[s] += 1
        if at[s] > before:
            work.extend(n for n in (s - 1, s + 1) if 0 <= n < count)
    if len(out) != 2 * count * microbatches:
        raise ValueError(f"in-flight numbers {in_flight} make stages wait for each other for ever")
    return tuple(out)


def _simulate_recurrence(
    orders: list[list[Action]],
    in_flight: tuple[int, ...],
    deferred: Sequence[int],
    stages: Sequence[StageTimes],
    boundaries: Sequence[BoundaryTimes],
    spans: list[ActionSpan] | None,
) -> list[float]:
    microbatches = sum(kind == FORWARD for kind, _ in orders[0])
    weight_s = [stage.weight_s for stage in stages]
    done, inputs, gradients = _recurrence(
        microbatches,
        in_flight,
        [stage.forward_s for stage in stages],
        [stage.backward_s - stage.weight_s for stage in stages],
        (weight_s, deferred) if any(weight_s) else None,
        [(boundary.forward.link_s, boundary.forward.latency_s) for boundary in boundaries],
        [(boundary.backward.link_s, boundary.backward.latency_s) for boundary in boundaries],
    )
    if spans is not None:
        for s, stage in enumerate(stages):
            free = 0.0
            for kind, m in orders[s]:
                if kind == FORWARD:
                    arrived, seconds = inputs[s * microbatches + m], stage.forward_s
                elif kind == BACKWARD:
                    arrived = gradients[(s + 1) * microbatches + m]
                    seconds = stage.backward_s - stage.weight_s
                else:
                    arrived, seconds = free, stage.weight_s
                begin = arrived if arrived > free else free
                free = begin + seconds
                if kind != WEIGHT_GRADIENTS or seconds > 0:
                    spans.append(ActionSpan(s, kind, m, begin, free))
    return done


class _LinkQueues:
    """When links and shared resources are free again; link 2 · boundary + 1 is the one for gradients."""

    def __init__(self, boundaries: Sequence[BoundaryTimes]) -> None:
        messages = [message for boundary in boundaries for message in (boundary.forward, boundary.backward)]
        numbers: dict[Hashable, int] = {}
        for message in messages:
            for name, _ in message.shared:
                numbers.setdefault(name, len(messages) + len(numbers))
        self.link_s = [message.link_s for message in messages]
        self.latency_s = [message.latency_s for message in messages]
        self.shared = [[(numbers[name], seconds) for name, seconds in message.shared] for message in messages]
        self.busy_until = [0.0] * (len(messages) + len(numbers))

    def send(self, ready_s: float, link: int) -> float:
        """Occupies the link and its shared resources with one message; returns when it arrives."""
        busy_until = self.busy_until
        begin = busy_until[link]
        begin = ready_s if ready_s > begin else begin
        shared = self.shared[link]
        for number, _ in shared:
            free = busy_until[number]
            begin = free if free > begin else begin
        sent = busy_until[link] = begin + self.link_s[link]
        for number, seconds in shared:
            until = busy_until[number] = begin + seconds
            sent = until if until > sent else sent
        return sent + self.latency_s[link]


def _simulate_events(
    orders: list[list[Action]],
    stages: Sequence[StageTimes],
    boundaries: Sequence[BoundaryTimes],
    microbatches: int,
    spans: list[ActionSpan] | None,
) -> list[float]:
    """Discrete events: the heap holds the ends of running actions, at most one per stage."""
    count = len(stages)
    last = count - 1
    links = _LinkQueues(boundaries)
    seconds = [(stage.forward_s, stage.backward_s - stage.weight_s) for stage in stages]
    at = [0] * count
    free = [0.0] * count
    running = [False] * count
    nothing: list[float | None] = [None] * microbatches
    arrivals = [[nothing[:], nothing[:]] for _ in range(count)]  # of inputs, of gradients
    arrivals[0][0] = [0.0] * microbatches
    arrivals[last][1] = [0.0] * microbatches
    heap: list[tuple[float, int, int]] = []  # end, 2 · stage + 1 for a backward, microbatch
    waiting = list(range(count))
    while True:
        for s in waiting:
            if running[s]:
                continue
            at[s], free[s] = _play_weight_gradients(s, orders[s], at[s], free[s], stages[s].weight_s, spans)
            if at[s] == len(orders[s]):
                continue
            kind, m = orders[s][at[s]]
            backward = kind == BACKWARD
            arrived = arrivals[s][backward][m]
            if arrived is None:
                continue
            begin = arrived if arrived > free[s] else free[s]
            end = begin + seconds[s][backward]
            running[s] = True
            free[s] = end
            at[s] += 1
            heapq.heappush(heap, (end, 2 * s + backward, m))
            if spans is not None:
                spans.append(ActionSpan(s, kind, m, begin, end))
        if not heap:
            break
        end, key, m = heapq.heappop(heap)
        s = key >> 1
        running[s] = False
        waiting = [s]
        if key & 1:
            if s > 0:
                arrivals[s - 1][1][m] = links.send(end, key - 2)
                waiting.append(s - 1)
        elif s < last:
            arrivals[s + 1][0][m] = links.send(end, key)
            waiting.append(s + 1)
    if any(position < len(order) for position, order in zip(at, orders, strict=True)):
        raise ValueError("the stages' orders wait for each other for ever")
    return free


def _play_weight_gradients(
    s: int, order: list[Action], at: int, free: float, seconds: float, spans: list[ActionSpan] | None
) -> tuple[int, float]:
    """Runs the Ws that come next on a device; returns (the position after them, when the device is free)."""
    while at < len(order) and order[at].kind == WEIGHT_GRADIENTS:
        begin, free = free, free + seconds
        if spans is not None and seconds > 0:
            spans.append(ActionSpan(s, WEIGHT_GRADIENTS, order[at].microbatch, begin, free))
        at += 1
    return at, free
