"""Watches over the ranks of an attempt: who has not been heard, and what that, or a failure, comes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from skyctl.errors import SkyctlError
from skyctl.launch import causes, life
from skyctl.launch.causes import Evidence, RankState
from skyctl.launch.events import Watcher
from skyctl.launch.life import Deadlines
from skyctl.remote.session import Session

FIRST_CAUSE_GRACE_S = 1.5
"""How long after the first failure others may still report one that came earlier or says more."""
BEATS_S = 3.5
"""A rank speaks every three seconds: one that did not may be on a node that is going."""

LogOf = Callable[[RankState], str | None]
Found = tuple[SkyctlError, Evidence]


class Vigil:
    """Looks at ``ranks`` (the run's own list) when it is asked to; one thread."""

    def __init__(
        self, ranks: list[RankState], sessions: Mapping[str, Session], limits: Deadlines, watcher: Watcher
    ) -> None:
        self._ranks, self._sessions, self._limits, self._watcher = ranks, sessions, limits, watcher
        self._stall_s = limits.stall_s
        self._iteration_s = 0.0
        self._suspected: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Ranks are started now."""
        self._began = self._looked = time.monotonic()

    def predicted(self, iteration_s: float) -> None:
        """How long a step should take: ranks may wait for each other for some steps."""
        self._iteration_s = iteration_s
        self._stall_s = max(self._limits.stall_s, self._limits.stall_steps * iteration_s)

    def look(self, reported: int, log_of: LogOf) -> Found | None:
        """Says who has not been heard for a while; what that means, where it means that all is over.

        Args:
            reported: steps that every rank has finished.
        """
        now = time.monotonic()
        asleep_s = now - self._looked - self._limits.warn_s / 2
        self._looked = now
        if asleep_s > 0:  # this process did not run: it could hear nobody
            for rank in self._ranks:
                rank.heard = None if rank.heard is None else rank.heard + asleep_s
        signs = self._signs(now)
        self._say_suspects(signs)
        verdict = life.judge(signs, self._limits, self._stall_s, self._iteration_s)
        if verdict is None:
            return None
        ranks = [self._ranks[number] for number in verdict.ranks]
        nodes = () if verdict.kind == "deadlock" else tuple(sorted({rank.spec.node for rank in ranks}))
        evidence = Evidence(verdict.kind, nodes, verdict.ranks, reported, ranks[0].phase)
        return _error(verdict, ranks, log_of(ranks[0])), evidence

    def grace_s(self, failed: Sequence[RankState]) -> float:
        """How long more failures are waited for."""
        only_peers = all(causes.follows(rank.failure or {}) for rank in failed)
        return self._limits.node_timeout_s if only_peers and self._unheard(BEATS_S) else FIRST_CAUSE_GRACE_S

    def cause(self, failed: Sequence[RankState], reported: int, log_of: LogOf) -> Found:
        """The first cause among what has failed."""
        first = causes.first_of(failed)
        evidence = causes.evidence_of(first, reported)
        if evidence.why == "peer" and (unheard := self._unheard(self._limits.warn_s)):
            nodes = tuple(sorted({rank.spec.node for rank in unheard}))
            numbers = tuple(rank.spec.rank for rank in unheard)
            quiet_s = time.monotonic() - (unheard[0].heard or self._began)
            return causes.lost(unheard, quiet_s), Evidence("lost", nodes, numbers, reported, unheard[0].phase)
        return causes.explain(first, self._sessions[first.spec.node], log_of(first)), evidence

    def _unheard(self, quiet_s: float) -> list[RankState]:
        """Ranks that have not failed and whose nodes are away, or that were not heard for so long."""
        signs = self._signs(time.monotonic())
        return [self._ranks[s.rank] for s in signs if s.away or (s.heard_s or 0.0) >= quiet_s]

    def _signs(self, now: float) -> list[life.Sign]:
        found = []
        for rank in self._ranks:
            if rank.result is not None or rank.failure is not None:
                continue
            session = self._sessions[rank.spec.node]
            found.append(
                life.Sign(
                    rank.spec.rank,
                    rank.spec.node,
                    rank.name,
                    rank.phase,
                    rank.waiting,
                    still_s=now - rank.moved,
                    started_s=now - self._began,
                    heard_s=None if rank.heard is None else now - rank.heard,
                    node_heard_s=session.silent_s,
                    away=session.away_s > 0.0,
                )
            )
        return found

    def _say_suspects(self, signs: Sequence[life.Sign]) -> None:
        found = life.suspects(signs, self._limits)
        for name, (quiet_s, ranks) in found.items():
            if name not in self._suspected:
                were = "; ".join(f"rank {s.rank} was in {s.phase}" for s in ranks)
                self._watcher.warn(f"{name} has not been heard for {quiet_s:.0f} s; {were}")
        for name in self._suspected - set(found):
            self._watcher.note(f"{name} is heard again")
        self._suspected = set(found)


def _error(verdict: life.Verdict, ranks: Sequence[RankState], log: str | None) -> SkyctlError:
    if verdict.kind == "lost":
        return causes.lost(ranks, verdict.quiet_s)
    if verdict.kind == "stalled":
        return causes.stalled(ranks[0], verdict.quiet_s, log)
    if verdict.kind == "silent":
        return causes.silent(ranks[0], verdict.quiet_s, log)
    return causes.deadlock(ranks, verdict.quiet_s)
