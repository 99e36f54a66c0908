"""Plays a schedule on numbers, by the contract's model of time.

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
the whole play is one pass over an order that depends on no time (max-plus recurrence, cached per shape).
With shared resources it is a discrete-event simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from skyctl.schedule.actions import BACKWARD, FORWARD, OPTIMIZER, Action, actions


@dataclass(frozen=True)
class StageTimes:
    """Seconds on one stage's device: forward and backward per microbatch, optimizer once a step."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0


@dataclass(frozen=True)
class Hop:
    """One message's way over one boundary in one direction.

    ``link_s``: seconds its directed link is occupied. ``shared``: (resource, seconds) for each shared one.
    """

    link_s: float = 0.0
    latency_s: float = 0.0
    shared: tuple[tuple[Hashable, float], ...] = ()


FREE = Hop()


@dataclass(frozen=True)
class Boundary:
    """Between stage s and s + 1: activations forward, gradients backward."""

    forward: Hop = FREE
    backward: Hop = FREE


class Span(NamedTuple):
    """One action of the play. ``kind`` F, B or O (optimizer, microbatch 0)."""

    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """One step. ``compute_s``: busy per stage, optimizer included; ``idle_s``: the rest of the step."""

    iteration_s: float
    compute_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    trace: tuple[Span, ...] = ()


def simulate(
    schedule: str,
    microbatches: int,
    in_flight: Sequence[int],
    stages: Sequence[StageTimes],
    boundaries: Sequence[Boundary],
    *,
    trace: bool = False,
) -> Simulation:
    """Plays one step.

    Args:
        schedule: its name; with ``in_flight`` (one number a stage) it gives every stage's order.
        stages: one entry a stage.
        boundaries: one entry between each two neighbours, so one less.
        trace: also return every action's start and end.

    Raises:
        ValueError: lengths that do not match, or orders that wait for each other for ever.
    """
    count = len(stages)
    if len(in_flight) != count or len(boundaries) != count - 1:
        raise ValueError(f"{count} stages, {len(in_flight)} in-flight numbers, {len(boundaries)} boundaries")
    orders = [actions(schedule, microbatches, number) for number in in_flight]
    spans: list[Span] | None = [] if trace else None
    if any(hop.shared for boundary in boundaries for hop in (boundary.forward, boundary.backward)):
        done = _play_events(orders, stages, boundaries, microbatches, spans)
    else:
        done = _play_recurrence(tuple(in_flight), stages, boundaries, microbatches, spans)
    ends = [at + stage.optimizer_s for at, stage in zip(done, stages, strict=True)]
    iteration_s = max(ends)
    if spans is not None:
        spans.extend(
            Span(s, OPTIMIZER, 0, done[s], ends[s]) for s in range(count) if stages[s].optimizer_s > 0
        )
        spans.sort(key=lambda span: (span.start_s, span.end_s, span.stage))
    compute = tuple(microbatches * (s.forward_s + s.backward_s) + s.optimizer_s for s in stages)
    idle = tuple(max(0.0, iteration_s - busy) for busy in compute)
    return Simulation(iteration_s, compute, idle, tuple(spans or ()))


def last_backwards(
    microbatches: int,
    in_flight: tuple[int, ...],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    ahead: Sequence[tuple[float, float]],
    back: Sequence[tuple[float, float]],
) -> list[float]:
    """When each stage's last backward ends, without shared resources: the fast path, for searches.

    Args:
        ahead: per boundary (link seconds, latency seconds) of a forward message; ``back``: of a backward.
    """
    count = len(forward_s)
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
            free[s] = at
            sent = sent_back[s]
            sent = (at if at > sent else sent) + back_s[s]
            sent_back[s] = sent
            gradients[i] = sent + back_latency[s]
    return free


@lru_cache(maxsize=128)
def _order(microbatches: int, in_flight: tuple[int, ...]) -> tuple[tuple[bool, int, int], ...]:
    """All stages' actions in one order in which every input comes before its use.

    Entries: (is forward, stage, stage · microbatches + microbatch).
    """
    count = len(in_flight)
    orders = [actions("eager-1f1b", microbatches, number) for number in in_flight]
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


def _play_recurrence(
    in_flight: tuple[int, ...],
    stages: Sequence[StageTimes],
    boundaries: Sequence[Boundary],
    microbatches: int,
    spans: list[Span] | None,
) -> list[float]:
    if spans is not None:  # the event player is the same arithmetic, and knows each action's start
        orders = [actions("eager-1f1b", microbatches, number) for number in in_flight]
        return _play_events(orders, stages, boundaries, microbatches, spans)
    return last_backwards(
        microbatches,
        in_flight,
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        ahead=[(boundary.forward.link_s, boundary.forward.latency_s) for boundary in boundaries],
        back=[(boundary.backward.link_s, boundary.backward.latency_s) for boundary in boundaries],
    )


def _play_events(
    orders: list[list[Action]],
    stages: Sequence[StageTimes],
    boundaries: Sequence[Boundary],
    microbatches: int,
    spans: list[Span] | None,
) -> list[float]:
    """Discrete events: the heap holds the ends of running actions, at most one a stage."""
    count = len(stages)
    last = count - 1
    at = [0] * count
    free = [0.0] * count
    running = [False] * count
    inputs: list[list[float | None]] = [[0.0 if s == 0 else None] * microbatches for s in range(count)]
    gradients: list[list[float | None]] = [[0.0 if s == last else None] * microbatches for s in range(count)]
    busy_until: dict[Hashable, float] = {}
    heap: list[tuple[float, int, int, int]] = []  # end, stage, 0 forward / 1 backward, microbatch

    def start(s: int) -> None:
        if running[s] or at[s] == len(orders[s]):
            return
        kind, m = orders[s][at[s]]
        arrived = inputs[s][m] if kind == FORWARD else gradients[s][m]
        if arrived is None:
            return
        begin = arrived if arrived > free[s] else free[s]
        end = begin + (stages[s].forward_s if kind == FORWARD else stages[s].backward_s)
        running[s] = True
        free[s] = end
        at[s] += 1
        heapq.heappush(heap, (end, s, 0 if kind == FORWARD else 1, m))
        if spans is not None:
            spans.append(Span(s, kind, m, begin, end))

    for s in range(count):
        start(s)
    while heap:
        end, s, backward, m = heapq.heappop(heap)
        running[s] = False
        if backward and s > 0:
            gradients[s - 1][m] = _send(end, (BACKWARD, s), boundaries[s - 1].backward, busy_until)
            start(s - 1)
        elif not backward and s < last:
            inputs[s + 1][m] = _send(end, (FORWARD, s), boundaries[s].forward, busy_until)
            start(s + 1)
        start(s)
    if any(position < len(order) for position, order in zip(at, orders, strict=True)):
        raise ValueError("the stages' orders wait for each other for ever")
    return free


def _send(ready_s: float, link: Hashable, hop: Hop, busy_until: dict[Hashable, float]) -> float:
    """Occupies the link and what it shares; returns the arrival."""
    names = [(link, hop.link_s), *((("shared", name), seconds) for name, seconds in hop.shared)]
    begin = max(ready_s, *(busy_until.get(name, 0.0) for name, _ in names))
    sent = begin
    for name, seconds in names:
        busy_until[name] = begin + seconds
        sent = max(sent, begin + seconds)
    return sent + hop.latency_s
