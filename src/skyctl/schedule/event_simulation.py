"""One step with shared resources, as a discrete-event simulation: first come, first served."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from skyctl.schedule.actions import BACKWARD, WEIGHT_GRADIENTS, Action
from skyctl.schedule.recurrence import PlayedStep
from skyctl.schedule.step_times import BoundaryTimes, StageTimes


class _LinkQueues:
    """When links and shared resources are free again; link 2 · boundary + 1 is the one for gradients."""

    def __init__(self, boundaries: Sequence[BoundaryTimes | None]) -> None:
        messages = [
            message
            for boundary in boundaries
            for message in ((None, None) if boundary is None else (boundary.forward, boundary.backward))
        ]
        present = [message for message in messages if message is not None]
        numbers: dict[Hashable, int] = {}
        for message in present:
            for name, _ in message.shared:
                numbers.setdefault(name, len(messages) + len(numbers))
        self.link_s = [0.0 if message is None else message.link_s for message in messages]
        self.latency_s = [0.0 if message is None else message.latency_s for message in messages]
        self.shared = [
            [] if message is None else [(numbers[name], seconds) for name, seconds in message.shared]
            for message in messages
        ]
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


def play_events(
    orders: Sequence[Sequence[Action]],
    stages: Sequence[StageTimes],
    boundaries: Sequence[BoundaryTimes | None],
) -> PlayedStep:
    """One step; the heap holds the ends of running actions, at most one per stage.

    Args:
        orders: each stage's actions, in its order.
        boundaries: between each two stages; None: one pipeline ends there, and another begins.

    Raises:
        ValueError: orders that wait for each other for ever.
    """
    has_next = [boundary is not None for boundary in (*boundaries, None)]
    has_previous = [False, *has_next[:-1]]
    links = _LinkQueues(boundaries)
    seconds = [(stage.forward_s, stage.backward_s - stage.weight_s) for stage in stages]
    at = [0] * len(stages)
    free = [0.0] * len(stages)
    running = [False] * len(stages)
    inputs: list[list[float]] = [[] for _ in stages]
    gradients: list[list[float]] = [[] for _ in stages]
    heap: list[tuple[float, int, int]] = []  # end, 2 · stage + 1 for a backward, microbatch
    waiting = list(range(len(stages)))
    while True:
        for s in waiting:
            if running[s]:
                continue
            order = orders[s]
            while at[s] < len(order) and order[at[s]].kind == WEIGHT_GRADIENTS:
                free[s] += stages[s].weight_s
                at[s] += 1
            if at[s] == len(order):
                continue
            kind, m = order[at[s]]
            backward = kind == BACKWARD
            begin = free[s]
            if has_next[s] if backward else has_previous[s]:
                arrivals = gradients[s] if backward else inputs[s]
                if m >= len(arrivals):
                    continue
                begin = max(begin, arrivals[m])
            end = begin + seconds[s][backward]
            running[s] = True
            free[s] = end
            at[s] += 1
            heapq.heappush(heap, (end, 2 * s + backward, m))
        if not heap:
            break
        end, key, m = heapq.heappop(heap)
        s = key >> 1
        running[s] = False
        waiting = [s]
        if key & 1:
            if has_previous[s]:
                gradients[s - 1].append(links.send(end, key - 2))
                waiting.append(s - 1)
        elif has_next[s]:
            inputs[s + 1].append(links.send(end, key))
            waiting.append(s + 1)
    if any(position < len(order) for position, order in zip(at, orders, strict=True)):
        raise ValueError("the stages' orders wait for each other for ever")
    return PlayedStep(free, inputs, gradients)
