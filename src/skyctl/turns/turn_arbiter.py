"""The jobs that have a device's turn, wait or are next: a state machine that reads no clock and does no I/O.

The server (``turn_server``) and the simulator (``turn_simulation``) both play it.
"""

from __future__ import annotations

from skyctl.turns.turn_policy import CREDIT_S, FAIR, PACK, JobAccount, service_order

DEMAND_ERROR = 1e-9


class TurnError(ValueError):
    """A job did what it can't do now: ask twice, give back what it does not hold, use less than before."""


class TurnArbiter:
    """The turns of one device, under a policy of that ``kind``. All times are seconds on one clock.

    At most one job holds a turn. Under PACK several may, while their demands add up to at most 1.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.jobs: dict[int, JobAccount] = {}
        self._opened = 0

    @property
    def waiting(self) -> list[JobAccount]:
        """The jobs that wait for a turn."""
        return [job for job in self.jobs.values() if job.asked_at is not None]

    @property
    def holders(self) -> list[JobAccount]:
        """The jobs that have a turn, without those that are late and were put aside."""
        return [job for job in self.jobs.values() if job.holds and job.aside_s is None]

    def open(
        self,
        now: float,
        name: str,
        *,
        priority: int = 0,
        used_s: float = 0.0,
        waited_s: float = 0.0,
        turns: int = 0,
        holds: bool = False,
    ) -> int:
        """A job comes; gives its number.

        Args:
            used_s, waited_s, turns: what it had under an arbiter before this one.
            holds: it was given a turn there that has not ended. Then more than one may hold for a while.
        """
        number = self._opened
        self._opened += 1
        job = JobAccount(number, name, now, priority, used_s, waited_s, turns, holds=holds)
        job.fair_s = min((other.fair_s for other in self._of_run(name) or self.jobs.values()), default=0.0)
        self.jobs[number] = job
        return number

    def close(self, number: int) -> None:
        """A job is gone, and its turn with it."""
        del self.jobs[number]

    def ask(self, number: int, now: float) -> None:
        """The job waits for a turn from now on. Raises TurnError."""
        job = self.jobs[number]
        if job.holds or job.asked_at is not None:
            raise TurnError(f"job {job.name} asks for a turn, and has asked before")
        if self.kind == FAIR:  # who was away does not catch up on what it did not ask for
            busy = [other.fair_s for other in self.jobs.values() if other.holds or other.asked_at is not None]
            self._count(job.name, max(job.fair_s, min(busy, default=0.0) - CREDIT_S))
        job.asked_at = now

    def give(self, number: int, now: float) -> None:
        """The job gives its turn back. Raises TurnError."""
        job = self.jobs[number]
        if not job.holds:
            raise TurnError(f"job {job.name} gives a turn back that it does not have")
        if job.wanted_at is not None:
            job.kept_s.append(now - job.wanted_at)
        job.holds, job.wanted_at, job.aside_s = False, None, None

    def use(self, number: int, used_s: float, turns: int) -> None:
        """Notes the job's use of the device since its beginning. Raises TurnError where that is less."""
        job = self.jobs[number]
        if used_s < job.used_s or turns < job.turns:
            raise TurnError(
                f"job {job.name} says {used_s:g} s, {turns} turns after {job.used_s:g}, {job.turns}"
            )
        spent_s = used_s - job.used_s
        counted_s = spent_s if job.aside_s is None else min(spent_s, job.aside_s)
        self._count(job.name, job.fair_s + counted_s)
        job.used_s, job.turns = used_s, turns

    def tell(self, number: int, remaining_s: float | None, demand: float | None) -> None:
        """Notes what the job says of itself: device seconds that it still needs, its part of the device.

        None: what was said before holds.
        """
        job = self.jobs[number]
        if remaining_s is not None:
            job.remaining_s = remaining_s
        if demand is not None:
            job.told_demand = demand

    def grant(self, now: float) -> list[int]:
        """Gives turns to who is next, as long as there are any; the numbers of those that have one now."""
        granted = []
        for job in service_order(self.kind, self.waiting, now):
            if not self._fits(job, now):
                continue
            assert job.asked_at is not None
            job.longest_wait_s = max(job.longest_wait_s, now - job.asked_at)
            job.waited_s += now - job.asked_at
            job.asked_at, job.holds = None, True
            granted.append(job.number)
        is_wanted = bool(self.waiting)
        for job in self.jobs.values():
            if job.holds and job.aside_s is None and (job.wanted_at is None or not is_wanted):
                job.wanted_at = now if is_wanted else None
        return granted

    def late(self, now: float) -> list[int]:
        """The numbers of jobs that keep a wanted turn for longer than is usual, and were not put aside."""
        return [job.number for job in self.holders if job.late_at <= now]

    def put_aside(self, number: int, now: float) -> None:
        """Others go on beside the late job's turn. Its use from now on is not held against it."""
        job = self.jobs[number]
        assert job.wanted_at is not None
        job.aside_s = now - job.wanted_at

    def _of_run(self, name: str) -> list[JobAccount]:
        return [job for job in self.jobs.values() if job.name == name]

    def _count(self, name: str, fair_s: float) -> None:
        """FAIR counts a run's ranks on the device as one."""
        for job in self._of_run(name):
            job.fair_s = fair_s

    def _fits(self, job: JobAccount, now: float) -> bool:
        holders = self.holders
        if self.kind != PACK:
            return not holders
        demand = sum(holder.demand(now) for holder in holders)
        return not holders or demand + job.demand(now) <= 1.0 + DEMAND_ERROR
