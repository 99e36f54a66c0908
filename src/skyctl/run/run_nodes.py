"""Which nodes a run has, which it has lost and why, and which of those are not trusted any more."""

from __future__ import annotations

import time
from dataclasses import dataclass

from skyctl.checkpoint.launcher.run_checkpoints import RunCheckpoints
from skyctl.errors import ProtocolError, SessionGoneError, SkyctlError
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.run_state import NodeSession
from skyctl.remote.agent_session import Session
from skyctl.remote.awake_clock import awake_s
from skyctl.run.live_run import LiveRun

HEARD_AGAIN_S = 5.0
"""A node that was lost is there again once it has answered since, and so shortly ago."""
RETRY_S, LONGEST_RETRY_S = 15.0, 120.0
"""Between two tries to connect to a lost node again."""


@dataclass
class LostNode:
    """A node that was given up at ``lost_at`` (awake seconds).

    ``problem``: one that knows its devices. ``trusted``: it is taken back by itself when it answers again.
    ``next_try``: to connect to it, in monotonic seconds.
    """

    why: str
    session: Session | None
    problem: Problem
    lost_at: float
    trusted: bool = True
    tries: int = 0
    next_try: float = 0.0

    def has_answered(self) -> bool:
        """Whether its session has brought anything since the node was given up, and brings more."""
        return (
            self.session is not None
            and self.session.has_answered(HEARD_AGAIN_S)
            and self.session.silent_s < awake_s() - self.lost_at
        )

    def note_try(self) -> None:
        """It is tried now; the next time, later than the last."""
        self.tries += 1
        self.next_try = time.monotonic() + min(LONGEST_RETRY_S, RETRY_S * 2.0**self.tries)


class RunNodes:
    """The nodes of one run, written down in its state as they change.

    A node that was lost is taken back when it answers again. One that sent what skyctl never sends
    (ProtocolError) is not, unless somebody asks for it.

    Attributes:
        lost: by name, those that were given up and have not come back.
        returned: those that the state has as lost, and that there are sessions of again.

    Args:
        plan: its problem knows the devices of nodes that the state has as lost.
    """

    def __init__(self, run: LiveRun, checkpoints: RunCheckpoints, plan: Plan) -> None:
        self._run, self._checkpoints = run, checkpoints
        self._noted: set[str] = set()
        state, sessions = run.journal.state, run.sessions
        distrusted = {name: sessions.pop(name) for name in state.untrusted if name in sessions}
        self.returned = [name for name in state.lost if name in sessions]
        self.lost: dict[str, LostNode] = {}
        for name, why in state.lost.items():
            if name not in sessions:
                self._add_lost(name, why, distrusted.get(name), plan, trusted=name not in state.untrusted)

    @property
    def given_up(self) -> dict[str, Session]:
        """By node that was lost, its session, where that may still hold there."""
        return {
            name: node.session
            for name, node in self.lost.items()
            if node.session is not None and not isinstance(node.session.lost, SessionGoneError)
        }

    @property
    def reasons(self) -> dict[str, str]:
        """By name of each node that was lost and has not come back, why, as one line."""
        return {name: node.why for name, node in self.lost.items()}

    def note(self) -> None:
        """Writes down sessions, and those of lost nodes: their agents may hold there, for others to end."""
        sessions = [
            NodeSession(node=name, session=s.id, cache=s.hello.cache)
            for name, s in {**self.given_up, **self._run.sessions}.items()
        ]
        journal = self._run.journal
        self._noted = set(self._run.sessions)
        lost = {name: why for name, why in self.reasons.items() if name not in self._run.sessions}
        untrusted = tuple(name for name in journal.state.untrusted if name in lost)
        journal.update(sessions=tuple(sessions), lost=lost, untrusted=untrusted)

    def update(self) -> None:
        """Writes down what has changed: nodes that have come, and those that can't be reached now."""
        sessions, journal = self._run.sessions, self._run.journal
        if set(sessions) != self._noted:
            self.note()
        away = tuple(sorted(name for name, s in sessions.items() if s.disconnected_s > 0))
        if away != journal.state.away:
            journal.update(away=away)

    def give_up_lost(self, names: tuple[str, ...], error: SkyctlError, plan: Plan) -> None:
        """Gives up those nodes, and all others whose sessions are over."""
        lost = dict.fromkeys(names, error.message)
        lost |= {name: s.lost.message for name, s in self._run.sessions.items() if s.lost is not None}
        for name, why in lost.items():
            trusted = not (isinstance(error, ProtocolError) and error.node == name)
            self.give_up(name, why, plan, trusted=trusted)

    def give_up(self, name: str, why: str, plan: Plan, *, trusted: bool = True) -> None:
        """Takes a lost node out of the run, and writes that down; it may come back.

        Args:
            why: of several lines, the first is kept.
            plan: the one under way, whose problem knows the node's devices.
            trusted: whether it is taken back by itself once it answers again.
        """
        session = self._run.take_out(name)
        self._checkpoints.drop(name)
        self._add_lost(name, why.splitlines()[0], session, plan, trusted=trusted)
        journal = self._run.journal
        if not trusted and name not in journal.state.untrusted:
            journal.update(untrusted=(*journal.state.untrusted, name))
        self.note()

    def take_in(self, name: str, session: Session) -> bool:
        """Puts a node that has come among the run's; False where it has gone again meanwhile."""
        run, lost = self._run, self.lost.get(name)
        if lost is not None and lost.session is not None and lost.session is not session:
            run.replaced.append(lost.session)
        if session.has_answered(HEARD_AGAIN_S):
            self.lost.pop(name, None)
            run.sessions[name] = session
            return True
        if lost is not None:
            lost.session, lost.lost_at = session, awake_s()
        elif name not in run.sessions:
            run.callbacks.warn(f"node {name} can't be used: it is not heard any more")
            run.replaced.append(session)
        return False

    def give_back(self) -> None:
        """The run is over: the sessions of lost nodes are closed with the others."""
        for name, node in self.lost.items():
            if node.session is not None:
                self._run.sessions.setdefault(name, node.session)

    def _add_lost(self, name: str, why: str, session: Session | None, plan: Plan, *, trusted: bool) -> None:
        next_try = time.monotonic() + RETRY_S
        self.lost[name] = LostNode(why, session, plan.problem, awake_s(), trusted, next_try=next_try)
