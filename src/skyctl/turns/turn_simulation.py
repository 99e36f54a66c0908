"""Jobs that share a device by turns, played on numbers by the arbiter that real jobs ask.

A switch takes no time here, and who has nothing to run gives its turn up at once to who waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skyctl.turns.turn_arbiter import TurnArbiter
from skyctl.turns.turn_policy import SLICE_S, TurnPolicy

SAME_TIME_S = 1e-9


@dataclass(frozen=True)
class SharedAction:
    """``gap_s``: seconds without the device before it. ``device_s``: seconds that it takes alone."""

    gap_s: float
    device_s: float


@dataclass(frozen=True)
class SharedJob:
    """A job of the simulation.

    Attributes:
        arrival_s: when it comes.
        load: the part of the device that an action uses while it runs. Actions that run at once and use more
            than all of it together are slowed down alike.
        demand: device seconds ÷ wall seconds alone, for PACK; None: that of its actions.
    """

    arrival_s: float
    actions: Sequence[SharedAction]
    priority: int = 0
    load: float = 1.0
    demand: float | None = None


@dataclass(frozen=True)
class TurnSimulation:
    """By job: when it was complete, its device seconds and the seconds that it waited for turns."""

    completions: tuple[float, ...]
    used_s: tuple[float, ...]
    waited_s: tuple[float, ...]


def simulate_turns(
    jobs: Sequence[SharedJob], policy: TurnPolicy, *, slice_s: float = SLICE_S, until_s: float = math.inf
) -> TurnSimulation:
    """Plays the jobs on one device; a job's priority is its own, not the policy's.

    Args:
        slice_s: so long a job keeps its turn from action to action while others wait.
        until_s: where it ends; jobs that are not complete by then have an infinite completion.
    """
    return _Player(jobs, policy.kind, slice_s).play(until_s)


def jain_index(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all have the same, 1 ÷ n where one has all; 1 of nothing at all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


class _PlayedJob:
    """A job's place in its actions. ``ready_at``: its next one; ``left_s``: of the one that runs."""

    def __init__(self, index: int, job: SharedJob) -> None:
        self.index, self.job = index, job
        self.next_action = 0
        self.ready_at = job.arrival_s + (job.actions[0].gap_s if job.actions else 0.0)
        self.left_s: float | None = None
        self.used_s = 0.0
        self.granted_at = 0.0
        self.number: int | None = None
        self.done_at = math.inf if job.actions else job.arrival_s
        self.waits = False
        self.waited_s = 0.0
        self.remaining_s = sum(action.device_s for action in job.actions)
        wall_s = self.remaining_s + sum(action.gap_s for action in job.actions)
        measured = job.load * self.remaining_s / wall_s if wall_s else 1.0
        self.demand = measured if job.demand is None else job.demand

    @property
    def pending(self) -> bool:
        """It has another action to begin, and does not wait for its turn."""
        return self.left_s is None and not self.waits and self.done_at == math.inf


class _Player:
    def __init__(self, jobs: Sequence[SharedJob], kind: str, slice_s: float) -> None:
        self.arbiter = TurnArbiter(kind)
        self.slice_s = slice_s
        self.jobs = [_PlayedJob(index, job) for index, job in enumerate(jobs)]
        self.now = 0.0

    def play(self, until_s: float) -> TurnSimulation:
        while (at := self._next_time()) <= until_s and at < math.inf:
            self._run_until(at)
            for job in self.jobs:
                if job.left_s is not None and job.left_s <= SAME_TIME_S:
                    self._end_action(job)
            for job in self.jobs:
                if job.pending and job.ready_at <= self.now + SAME_TIME_S:
                    self._become_ready(job)
            self._hand_over()
        return TurnSimulation(
            tuple(job.done_at for job in self.jobs),
            tuple(job.used_s for job in self.jobs),
            tuple(job.waited_s for job in self.jobs),
        )

    def _rate(self) -> float:
        return 1.0 / max(1.0, sum(job.job.load for job in self.jobs if job.left_s is not None))

    def _next_time(self) -> float:
        rate = self._rate()
        starts = (job.ready_at for job in self.jobs if job.pending)
        ends = (self.now + job.left_s / rate for job in self.jobs if job.left_s is not None)
        return max(self.now, min((*starts, *ends), default=math.inf))

    def _run_until(self, at: float) -> None:
        rate = self._rate()
        for job in self.jobs:
            if job.left_s is not None:
                job.left_s -= (at - self.now) * rate
                job.used_s += at - self.now
        self.now = at

    def _end_action(self, job: _PlayedJob) -> None:
        assert job.number is not None
        job.left_s = None
        job.remaining_s -= job.job.actions[job.next_action].device_s
        job.next_action += 1
        self.arbiter.use(job.number, job.used_s, job.next_action)
        if job.next_action == len(job.job.actions):
            job.done_at = self.now
            job.waited_s = self.arbiter.jobs[job.number].waited_s
            self.arbiter.close(job.number)
        else:
            job.ready_at = self.now + job.job.actions[job.next_action].gap_s

    def _become_ready(self, job: _PlayedJob) -> None:
        """Begins its next action where it holds a turn that it may keep, else asks for one."""
        if job.number is None:
            job.number = self.arbiter.open(self.now, str(job.index), priority=job.job.priority)
        self.arbiter.tell(job.number, job.remaining_s, job.demand)
        if self.arbiter.jobs[job.number].holds:
            if not self.arbiter.waiting or self.now - job.granted_at < self.slice_s - SAME_TIME_S:
                self._begin(job)
                return
            self.arbiter.give(job.number)
        self.arbiter.ask(job.number, self.now)
        job.waits = True

    def _hand_over(self) -> None:
        if self.arbiter.waiting:
            for holder in self.arbiter.holders:
                if self._by_number(holder.number).left_s is None:
                    self.arbiter.give(holder.number)
        for number in self.arbiter.grant(self.now):
            job = self._by_number(number)
            job.waits, job.granted_at = False, self.now
            self._begin(job)

    def _begin(self, job: _PlayedJob) -> None:
        job.left_s = job.job.actions[job.next_action].device_s

    def _by_number(self, number: int) -> _PlayedJob:
        return next(job for job in self.jobs if job.number == number)
