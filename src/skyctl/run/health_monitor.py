"""The health of ranks and nodes: what the launcher heard of each, and what follows from it.

**Unreachable is not dead.** A node that the launcher does not hear may train on: as long as the ranks that
are heard get on, it is only redialled. It is lost when it is not heard *and* all of those wait. A rank that
is silent though its agent answers, while others wait for it, has stalled. ``judge_health``, which decides
that, is pure; ``HealthMonitor`` keeps what it needs and finds the first cause of several failures. All times
are by ``remote.awake_clock``: while this process is suspended it can hear nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from skyctl.errors import ProtocolError, SkyctlError
from skyctl.remote.agent_session import Session
from skyctl.remote.awake_clock import awake_s
from skyctl.run import rank_failure
from skyctl.run.callbacks import RunCallbacks
from skyctl.run.rank_failure import FailureReport, RankState

FIRST_CAUSE_GRACE_S = 1.5
"""How long after the first failure others may still report one that came earlier or says more."""
MISSED_HEARTBEAT_S = 3.5
"""A rank speaks every three seconds: one that did not may be on a node that is going."""

LogPathOf = Callable[[RankState], str | None]
DetectedFailure = tuple[SkyctlError, FailureReport]


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which silence or waiting counts as a failure.

    ``start_s``: for a rank's first word (its Python must import torch). ``silence_s``: between two words of a
    rank that nobody is seen to wait for. ``stall_s``: for ranks that all wait for each other and get nowhere,
    or ``stall_steps`` predicted steps if that is more. A rank that computes may take as long as it needs.
    ``warn_s``: a rank or node not heard for so long is named. ``node_timeout_s``: not heard for so long while
    all that are heard wait, it is given up. ``stop_s``: for a last checkpoint, when the run is to end.
    """

    start_s: float = 180.0
    silence_s: float = 45.0
    stall_s: float = 60.0
    stall_steps: float = 5.0
    warn_s: float = 8.0
    node_timeout_s: float = 10.0
    stop_s: float = 60.0


@dataclass(frozen=True)
class RankHealth:
    """A rank that has not ended, as it looks now. Times in seconds ago.

    ``heard_s``: its last word (None: none yet, ``started_s`` counts). ``node_heard_s``: anything at all from
    its node. ``away``: the connection is known to be gone. ``still_s``: since its phase changed.
    """

    number: int
    node: str
    name: str
    phase: str
    waiting: bool
    still_s: float
    started_s: float
    heard_s: float | None
    node_heard_s: float = 0.0
    away: bool = False


@dataclass(frozen=True)
class HealthVerdict:
    """The fault that was found, and the ranks that have it.

    ``lost``: their nodes are given up. ``stalled``: silent, others wait, the agent answers. ``silent``: no
    sign of life in all that time. ``deadlock``: every one waits for another.
    """

    kind: Literal["lost", "stalled", "silent", "deadlock"]
    ranks: tuple[int, ...]
    quiet_s: float


WAITING_STEP_SHARE = 0.5
"""Ranks that are heard stand still because a node is gone, if they have waited for half of the time at which
it is given up (they had some microbatches left when it went), and for this part of a step."""


def silent_ranks(ranks: Sequence[RankHealth], limits: Deadlines) -> dict[str, tuple[float, list[RankHealth]]]:
    """The ranks not heard for ``warn_s``: by node, or by rank's name where its node is heard."""
    silent: dict[str, tuple[float, list[RankHealth]]] = {}
    for rank in ranks:
        if _node_is_silent(rank, limits):
            node = silent.setdefault(f"node {rank.node}", (rank.node_heard_s, []))
            node[1].append(rank)
        elif rank.heard_s is not None and rank.heard_s >= limits.warn_s:
            silent[rank.name] = (rank.heard_s, [rank])
    return silent


def judge_health(
    ranks: Sequence[RankHealth], limits: Deadlines, stall_s: float, iteration_s: float = 0.0
) -> HealthVerdict | None:
    """The first thing that is wrong, or None. Pure.

    Args:
        ranks: all ranks that have not ended.
        stall_s: patience with ranks that all wait for each other.
        iteration_s: a step's predicted time: with slow microbatches, waiting for long is nothing special.
    """
    for rank in ranks:
        if rank.heard_s is None and rank.started_s > limits.start_s:
            return HealthVerdict("silent", (rank.number,), rank.started_s)
    unheard = [rank for rank in ranks if _is_silent(rank, limits)]
    heard = [rank for rank in ranks if not _is_silent(rank, limits)]
    gone = [rank for rank in unheard if _silent_for_s(rank) >= limits.node_timeout_s]
    still_s = max(limits.node_timeout_s / 2, iteration_s * WAITING_STEP_SHARE)
    if gone and heard and all(rank.waiting and rank.still_s >= still_s for rank in heard):
        lost = [rank for rank in gone if _node_is_silent(rank, limits)]
        named = lost or gone
        return HealthVerdict(
            "lost" if lost else "stalled",
            tuple(rank.number for rank in named),
            max(_silent_for_s(rank) for rank in named),
        )
    for rank in ranks:
        if not rank.away and rank.heard_s is not None and rank.heard_s > limits.silence_s:
            return HealthVerdict("silent", (rank.number,), rank.heard_s)
    if ranks and all(rank.waiting and rank.still_s > stall_s and not rank.away for rank in ranks):
        return HealthVerdict("deadlock", tuple(rank.number for rank in ranks), stall_s)
    return None


def _node_is_silent(rank: RankHealth, limits: Deadlines) -> bool:
    return rank.away or rank.node_heard_s >= limits.warn_s


def _is_silent(rank: RankHealth, limits: Deadlines) -> bool:
    return rank.away or _silent_for_s(rank) >= limits.warn_s


def _silent_for_s(rank: RankHealth) -> float:
    """A rank that is starting imports torch, and says nothing meanwhile: then its node's silence counts."""
    return rank.node_heard_s if rank.heard_s is None else rank.heard_s


class HealthMonitor:
    """Finds ranks of an attempt that are silent or stuck, whenever ``check`` is called; for one thread."""

    def __init__(
        self,
        ranks: list[RankState],
        sessions: Mapping[str, Session],
        deadlines: Deadlines,
        callbacks: RunCallbacks,
    ) -> None:
        self._ranks, self._sessions, self._callbacks = ranks, sessions, callbacks
        self.deadlines = deadlines
        self._stall_s = deadlines.stall_s
        self._iteration_s = 0.0
        self._suspects: dict[str, set[int]] = {}
        self._named_after_s: dict[str, float] = {}
        self._awaited: tuple[str, ...] = ()
        self.begin()

    def begin(self) -> None:
        """Starts the clock of ``Deadlines.start_s`` anew: call it when the ranks are started."""
        self._began_at = awake_s()

    def expect(self, iteration_s: float) -> None:
        """Allows ranks to wait for each other for ``Deadlines.stall_steps`` steps of so many seconds."""
        self._iteration_s = iteration_s
        self._stall_s = max(self.deadlines.stall_s, self.deadlines.stall_steps * iteration_s)

    def check(self, reported: int, log_of: LogPathOf) -> DetectedFailure | None:
        """Says who has not been heard for a while; what that means, where it means that all is over.

        Args:
            reported: steps that every rank has finished.
        """
        health = self._health()
        self._name_suspects(health)
        verdict = judge_health(health, self.deadlines, self._stall_s, self._iteration_s)
        if verdict is None:
            return None
        ranks = [self._ranks[number] for number in verdict.ranks]
        nodes = () if verdict.kind == "deadlock" else tuple(sorted({rank.spec.node for rank in ranks}))
        report = FailureReport(verdict.kind, nodes, verdict.ranks, reported, ranks[0].phase)
        return _verdict_error(verdict, ranks, log_of(ranks[0])), report

    def grace_s(self, failed: Sequence[RankState], alive: Collection[int]) -> float:
        """How long more failures are waited for, counted from the first one.

        If ranks have only lost their peers, one that has not been alive since may be the one that died.
        Its agent says by which signal once nothing of it is left. A rank that lives says so within seconds.

        Args:
            alive: the ranks that have said that they are since the first failure.
        """
        tellers = [
            self._ranks[origin[1]]
            for other in failed
            if not rank_failure.is_consequence(other)
            and (origin := rank_failure.passed_on_by(other)) is not None
        ]
        silent = [rank for rank in tellers if rank.failure is None and rank.result is None]
        if (
            silent
        ):  # it may have come to them from another, and one that does not wait be writing a checkpoint
            limits = self.deadlines
            return limits.node_timeout_s if all(rank.waiting for rank in silent) else limits.stop_s
        only_consequences = all(rank_failure.is_consequence(rank) for rank in failed)
        quiet = [
            rank
            for rank in self._ranks
            if rank.failure is None and rank.result is None and rank.spec.rank not in alive
        ]
        waits = only_consequences and bool(quiet or self._silent_ranks(MISSED_HEARTBEAT_S))
        return self.deadlines.node_timeout_s if waits else FIRST_CAUSE_GRACE_S

    def first_cause(self, failed: Sequence[RankState], reported: int, log_of: LogPathOf) -> DetectedFailure:
        """The first cause among failed ranks: an error to show, and the report that a restart is decided by.

        Args:
            failed: at least one; each has a ``failure``.
            reported: steps that every rank has finished.
            log_of: gives the path of what a rank has printed, for the error; None where there is none.
        """
        first = rank_failure.first_failure(failed)
        passed_on = rank_failure.passed_on_by(first)
        if passed_on is not None and not rank_failure.is_consequence(first):
            members, is_circle = rank_failure.first_of_chain(first, self._ranks)
            if is_circle:
                return rank_failure.contradiction(members, reported)
            accuser, teller = members
            if not isinstance(teller.failure, ProtocolError):  # else it is known to have told first
                return rank_failure.accusation(accuser, teller, reported, log_of(accuser))
            first = teller
        if (accused := rank_failure.accused_rank(first)) is not None:
            return rank_failure.accusation(first, self._ranks[accused], reported, log_of(first))
        report = rank_failure.failure_report(first, reported)
        if report.cause == "peer" and (silent := self._silent_ranks(self.deadlines.warn_s)):
            nodes = tuple(sorted({rank.spec.node for rank in silent}))
            numbers = tuple(rank.spec.rank for rank in silent)
            quiet_s = awake_s() - (silent[0].heard_at or self._began_at)
            lost = FailureReport("lost", nodes, numbers, reported, silent[0].phase)
            return rank_failure.lost_error(silent, quiet_s), lost
        if report.cause == "peer" and passed_on is not None:
            members, _ = rank_failure.first_of_chain(first, self._ranks)
            shown = rank_failure.failure_error(
                members[0], self._sessions[members[0].spec.node], log_of(members[0])
            )
            return rank_failure.broken_connection(members, shown, reported)
        if (other := rank_failure.unreachable_rank(first)) is not None:
            report = replace(report, apart=(first.spec.node, self._ranks[other].spec.node))
        return rank_failure.failure_error(first, self._sessions[first.spec.node], log_of(first)), report

    def _silent_ranks(self, quiet_s: float) -> list[RankState]:
        """Ranks that have not failed and whose nodes are away, or that were not heard for so long."""
        health = self._health()
        return [self._ranks[rank.number] for rank in health if rank.away or (rank.heard_s or 0.0) >= quiet_s]

    def _health(self) -> list[RankHealth]:
        """How each rank that has not ended looks now."""
        now = awake_s()
        health = []
        for rank in self._ranks:
            if rank.result is not None or rank.failure is not None or rank.is_out or rank.is_joining:
                continue
            session = self._sessions[rank.spec.node]
            health.append(
                RankHealth(
                    rank.spec.rank,
                    rank.spec.node,
                    rank.name,
                    rank.phase,
                    rank.waiting,
                    still_s=now - rank.phase_since,
                    started_s=now - self._began_at,
                    heard_s=None if rank.heard_at is None else now - rank.heard_at,
                    node_heard_s=session.silent_s,
                    away=session.disconnected_s > 0.0,
                )
            )
        return health

    def _name_suspects(self, health: Sequence[RankHealth]) -> None:
        """Says who is silent (again when that has doubled), who is heard again, and who alone is awaited."""
        silent_now = silent_ranks(health, self.deadlines)
        for name, (quiet_s, ranks) in silent_now.items():
            if quiet_s >= 2 * self._named_after_s.get(name, 0.0):
                self._named_after_s[name] = quiet_s
                were = "; ".join(f"rank {rank.number} was in {rank.phase}" for rank in ranks)
                self._callbacks.warn(f"{name} has not been heard for {quiet_s:.0f} s; {were}")
        suspects = {name: {rank.number for rank in ranks} for name, (_, ranks) in silent_now.items()}
        silent: set[int] = set().union(*suspects.values())
        for name in self._suspects.keys() - suspects.keys():
            self._named_after_s.pop(name, None)
            if self._suspects[name].isdisjoint(silent):  # else it goes by another name now
                self._callbacks.note(f"{name} is heard again")
        self._suspects = suspects
        all_silent = all(_is_silent(rank, self.deadlines) for rank in health)
        awaited = tuple(sorted(silent_now)) if all_silent else ()
        if awaited and awaited != self._awaited:
            self._callbacks.note(
                f"waiting for {', '.join(awaited)} to be heard again: no rank is left that is heard"
            )
        self._awaited = awaited


def _verdict_error(verdict: HealthVerdict, ranks: Sequence[RankState], log: str | None) -> SkyctlError:
    if verdict.kind == "lost":
        return rank_failure.lost_error(ranks, verdict.quiet_s)
    if verdict.kind == "stalled":
        return rank_failure.stalled_error(ranks[0], verdict.quiet_s, log)
    if verdict.kind == "silent":
        return rank_failure.silent_error(ranks[0], verdict.quiet_s, log)
    return rank_failure.deadlock_error(ranks, verdict.quiet_s)
