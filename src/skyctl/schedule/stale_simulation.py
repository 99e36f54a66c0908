"""Workers of a parameter server, played event by event: what each computes, pushes, waits for and pulls.

A worker pushes its gradients after each clock, the root applies one push after the other as they arrive, and
the worker pulls the weights once the slowest worker is no more than the allowed number of clocks behind it
(stale synchronous parallel, Ho et al., NIPS 2013). Lines that several workers share carry one message after
the other, in the order in which they begin.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from skyctl.schedule.step_times import FREE_MESSAGE, MessageTimes

_COMPUTED, _ARRIVED, _APPLIED, _PULLED = range(4)


@dataclass(frozen=True)
class WorkerTimes:
    """The times that one worker's clocks take.

    Attributes:
        compute_s: seconds of each clock's forwards and backwards, in their order.
        push, pull: its gradients' way to the root, and the weights' way back; free for the root itself.
        apply_s: seconds of the root's processor for one push of its.
    """

    compute_s: Sequence[float]
    push: MessageTimes = FREE_MESSAGE
    pull: MessageTimes = FREE_MESSAGE
    apply_s: float = 0.0

    @property
    def least_s(self) -> float:
        """Seconds of a clock with nobody to wait for, on average."""
        compute_s = sum(self.compute_s) / len(self.compute_s)
        return compute_s + self.push.unqueued_s + self.apply_s + self.pull.unqueued_s


@dataclass
class StalePlay:
    """How a run of workers went, as played.

    Attributes:
        ends: by worker and clock, when it had the weights for the next one, in seconds.
        ahead: by worker and clock, by how many clocks it was ahead of the slowest when it might go on.
    """

    ends: list[list[float]] = field(default_factory=list)
    ahead: list[list[int]] = field(default_factory=list)

    @property
    def run_s(self) -> float:
        """When the last worker had ended."""
        return max(ends[-1] for ends in self.ends)

    def clock_s(self, skipped: int = 0) -> float:
        """Seconds a clock in the long run: from the slowest's end of the first ``skipped`` to the run's."""
        began = max(ends[skipped - 1] for ends in self.ends) if skipped else 0.0
        return (self.run_s - began) / (len(self.ends[0]) - skipped)


def simulate_stale(workers: Sequence[WorkerTimes], staleness: int | None) -> StalePlay:
    """Plays a run.

    Args:
        workers: with one and the same number of clocks, one at least.
        staleness: how many clocks a worker may be ahead of the slowest; 0: all wait for all after each clock;
            None: any number.
    """
    return _Play(workers, staleness).run()


class _Play:
    def __init__(self, workers: Sequence[WorkerTimes], staleness: int | None) -> None:
        self._workers, self._staleness = workers, staleness
        self._clocks = len(workers[0].compute_s)
        self._finished = [0] * len(workers)
        self._behind = [len(workers)] * self._clocks
        """By clock, how many have not finished it."""
        self._slowest = 0
        self._waiting: dict[int, int] = {}
        self._free: dict[Hashable, float] = {}
        self._applying_until = 0.0
        self._events: list[tuple[float, int, int, int]] = []
        self._count = 0
        self._play = StalePlay([[] for _ in workers], [[] for _ in workers])

    def run(self) -> StalePlay:
        for number, worker in enumerate(self._workers):
            self._add(worker.compute_s[0], _COMPUTED, number)
        while self._events:
            now, _, kind, number = heapq.heappop(self._events)
            worker = self._workers[number]
            if kind == _COMPUTED:
                self._add(self._carry(now, worker.push), _ARRIVED, number)
            elif kind == _ARRIVED:
                self._applying_until = max(now, self._applying_until) + worker.apply_s
                self._add(self._applying_until, _APPLIED, number)
            elif kind == _APPLIED:
                self._finish(now, number)
            else:
                self._play.ends[number].append(now)
                done = len(self._play.ends[number])
                if done < self._clocks:
                    self._add(now + worker.compute_s[done], _COMPUTED, number)
        return self._play

    def _add(self, at: float, kind: int, number: int) -> None:
        self._count += 1  # of two at the same time, the one that was known first
        heapq.heappush(self._events, (at, self._count, kind, number))

    def _carry(self, now: float, hop: MessageTimes) -> float:
        """When a message that is ready now has arrived."""
        start = max([now, *(self._free.get(name, 0.0) for name, _ in hop.shared)])
        for name, seconds in hop.shared:
            self._free[name] = start + seconds
        return start + hop.unqueued_s

    def _finish(self, now: float, number: int) -> None:
        """A push is applied: its worker, and those that waited for it, may go on."""
        done = self._finished[number]
        self._behind[done] -= 1
        self._finished[number] = done + 1
        self._waiting[number] = done + 1
        while self._slowest < self._clocks and not self._behind[self._slowest]:
            self._slowest += 1
        for waiting, finished in list(self._waiting.items()):
            ahead = finished - self._slowest
            if self._staleness is None or ahead <= self._staleness:
                del self._waiting[waiting]
                self._play.ahead[waiting].append(ahead)
                self._add(self._carry(now, self._workers[waiting].pull), _PULLED, waiting)
