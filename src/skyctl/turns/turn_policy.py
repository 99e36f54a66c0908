"""The policies by which jobs on one device take turns, and the order in which each serves who waits.

Starvation bound: whoever has waited ``STARVE_S`` (30 s) goes next under every policy, the longest wait first.
A turn that is under way is never cut short. So on a device of ``n`` jobs nobody waits for a turn longer than
``STARVE_S + n · (SLICE_S + a)``, where ``a`` is the longest action of any of them.

A job may hang in its turn, or be stopped. So who keeps a wanted turn for longer than is usual for this job is
*late*, and others go on beside it. Nobody can tell whether it computes yet. If it does, two compute at once:
their actions take longer, and give the same. It ends the turn that it has when it can, and asks anew.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field

from skyctl.errors import InputError
from skyctl.schedule.unusual_times import unusual_after_s

STARVE_S = 30.0
SLICE_S = 0.05
"""So long a job keeps its turn from action to action while others wait."""
IDLE_S = 0.001
"""So long a job with nothing to compute keeps a turn that is wanted: between two actions a rank takes part of
a millisecond for messages."""
CREDIT_S = 1.0
"""So many device seconds at most a job is owed under FAIR: others' long actions while it waits for a message
are made up for, hours in which it did not ask are not."""
LEAST_LATE_S = 5.0
"""Nobody is late before it has kept a wanted turn for so long."""
LEAST_TURNS, KEPT_TURNS = 3, 64
"""So many turns tell what is usual for a job; so many of the last ones are looked at."""
FIFO, FAIR, SRTF, PACK, PRIORITY = "fifo", "fair", "srtf", "pack", "priority"
MEASURE_S = 1.0
"""Before a job has had the device to use for so long, its demand counts as 1."""
_OPTION = re.compile(r"fifo|fair|srtf|pack|priority=([0-9]|[1-9][0-9])")


@dataclass(frozen=True)
class TurnPolicy:
    """``kind``: one of the five names. ``priority``: 0 to 99, the job's own; the highest goes first."""

    kind: str
    priority: int = 0

    def __str__(self) -> str:
        return f"{PRIORITY}={self.priority}" if self.kind == PRIORITY else self.kind


def parse_turns(text: str) -> TurnPolicy:
    """The policy that an option's text asks for.

    Raises:
        InputError: it is none; the message says which there are.
    """
    found = _OPTION.fullmatch(text)
    if found is None:
        raise InputError(
            f"turns {text[:40]!r}: needs fifo, fair, srtf, pack or priority=N, N a whole number from 0 to 99",
            hint="as in --turns fair, or --turns priority=10 (the highest goes first)",
        )
    return TurnPolicy(text) if found[1] is None else TurnPolicy(PRIORITY, int(found[1]))


@dataclass
class JobAccount:
    """One job on a device.

    Attributes:
        number: in the order in which jobs came.
        name: its run's id: jobs of one name are ranks of one run. Ids sort by when runs were launched.
        used_s: device seconds that it used.
        waited_s: seconds that it waited for turns, without the wait under way.
        turns: how many it had.
        longest_wait_s: of its waits that have ended.
        wanted_at: since when others want the turn that it has; None: nobody does, or it has none.
        kept_s: of its last turns that others wanted, so long it has kept each from then on.
        aside_s: it is late and others go on; it had kept the turn for so long by then.
        asked_at: since when it waits, on the arbiter's clock; None: it does not.
        holds: it has a turn.
        remaining_s: device seconds that it says it needs yet; 0, so that it goes first, before it says so.
        told_demand: the part of the device, up to 1, that it says it uses; None: that is measured.
        fair_s: its run's device seconds as FAIR counts them: who comes or comes back has no debt or credit.
    """

    number: int
    name: str
    opened_at: float
    priority: int = 0
    used_s: float = 0.0
    waited_s: float = 0.0
    turns: int = 0
    longest_wait_s: float = field(default=0.0, init=False)
    asked_at: float | None = None
    holds: bool = False
    remaining_s: float = 0.0
    told_demand: float | None = None
    wanted_at: float | None = field(default=None, init=False)
    kept_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TURNS), init=False)
    aside_s: float | None = field(default=None, init=False)
    fair_s: float = 0.0
    used_before_s: float = field(init=False)
    waited_before_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.used_before_s, self.waited_before_s = self.used_s, self.waited_s

    @property
    def late_at(self) -> float:
        """From when on it keeps its turn for longer than is usual; infinite while nobody wants that."""
        if self.wanted_at is None:
            return math.inf
        usual_s = unusual_after_s(self.kept_s) if len(self.kept_s) >= LEAST_TURNS else 0.0
        return self.wanted_at + max(LEAST_LATE_S, usual_s)

    def demand(self, now: float) -> float:
        """The part of the device that it uses when not kept waiting: device seconds ÷ wall seconds."""
        if self.told_demand is not None:
            return self.told_demand
        waits_s = 0.0 if self.asked_at is None else now - self.asked_at
        active_s = now - self.opened_at - (self.waited_s - self.waited_before_s) - waits_s
        return 1.0 if active_s < MEASURE_S else min(1.0, (self.used_s - self.used_before_s) / active_s)


def service_order(kind: str, waiting: list[JobAccount], now: float) -> list[JobAccount]:
    """Those who may go next, the first one first. One that has waited ``STARVE_S`` is the only one."""
    oldest = min(waiting, key=_asked_at, default=None)
    if oldest is not None and now - _asked_at(oldest) >= STARVE_S:
        return [oldest]
    return sorted(waiting, key=lambda job: (*_precedence(kind, job), job.number))


def _precedence(kind: str, job: JobAccount) -> tuple[float | str, ...]:
    if kind == FIFO:  # by run: ranks come to each device in an order of its own, and runs to all in one
        return (job.name,)
    if kind == FAIR:
        return (job.fair_s,)
    if kind == SRTF:
        return (job.remaining_s,)
    if kind == PACK:
        return (_asked_at(job),)
    if kind == PRIORITY:
        return (-job.priority, _asked_at(job))
    raise ValueError(kind)


def _asked_at(job: JobAccount) -> float:
    assert job.asked_at is not None
    return job.asked_at
