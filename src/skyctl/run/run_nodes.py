"""Which nodes a run has, which it has lost and why, and which of those are not trusted any more."""

from __future__ import annotations

from collections.abc import Callable

from skyctl.errors import ProtocolError, SkyctlError
from skyctl.records.plan import Plan
from skyctl.records.run_state import NodeSession
from skyctl.remote.agent_session import Session
from skyctl.run.event_sink import EventSink
from skyctl.run.replanner import Replanner


class RunNodes:
    """The nodes of one run, written down in its state as they change.

    A node that was lost is taken back when it answers again. One that sent what skyctl never sends
    (ProtocolError) is not, unless somebody asks for it.

    ``lost``: by node, why it was given up.

    Args:
        sessions: by node, those in use; changed in place.
        drop: told of a node that nothing is to be asked of any more.
    """

    def __init__(
        self,
        sessions: dict[str, Session],
        sink: EventSink,
        replanner: Replanner,
        plan: Plan,
        drop: Callable[[str], None],
    ) -> None:
        self._sessions, self._sink, self._replanner, self._drop = sessions, sink, replanner, drop
        self._noted: set[str] = set()
        state = sink.state
        distrusted = {name: sessions.pop(name) for name in state.untrusted if name in sessions}
        replanner.request_nodes([name for name in state.lost if name in sessions])
        self.lost = {name: why for name, why in state.lost.items() if name not in sessions}
        for name in self.lost:
            replanner.note_lost(name, distrusted.get(name), plan, trusted=name not in state.untrusted)

    def note(self) -> None:
        """Writes down sessions, and those of lost nodes: their agents may hold there, for others to end."""
        known = [
            NodeSession(node=name, session=s.id, cache=s.hello.cache)
            for name, s in {**self._replanner.given_up, **self._sessions}.items()
        ]
        self._noted = set(self._sessions)
        lost = {name: why for name, why in self.lost.items() if name not in self._sessions}
        untrusted = tuple(name for name in self._sink.state.untrusted if name in lost)
        self._sink.update(sessions=tuple(known), lost=lost, untrusted=untrusted)

    def update(self) -> None:
        """Writes down what has changed: nodes that have come, and those that can't be reached now."""
        if set(self._sessions) != self._noted:
            self.note()
        away = tuple(sorted(name for name, s in self._sessions.items() if s.disconnected_s > 0))
        if away != self._sink.state.away:
            self._sink.update(away=away)

    def give_up_lost(self, names: tuple[str, ...], error: SkyctlError, plan: Plan) -> None:
        """Gives up those nodes, and all others whose sessions are over."""
        lost = dict.fromkeys(names, error.message)
        lost |= {name: s.lost.message for name, s in self._sessions.items() if s.lost is not None}
        for name, why in lost.items():
            trusted = not (isinstance(error, ProtocolError) and error.node == name)
            self.give_up(name, why, plan, trusted=trusted)

    def give_up(self, name: str, why: str, plan: Plan, *, trusted: bool = True) -> None:
        """A node is lost; it may come back."""
        session = self._sessions.pop(name, None)
        self.lost[name] = why.splitlines()[0]
        self._drop(name)
        self._replanner.note_lost(name, session, plan, trusted=trusted)
        if not trusted and name not in self._sink.state.untrusted:
            self._sink.update(untrusted=(*self._sink.state.untrusted, name))
        self.note()

    def keep_lost(self, plan_nodes: tuple[str, ...]) -> None:
        """The nodes of the plan that the run goes on with are not lost."""
        self.lost = {name: why for name, why in self.lost.items() if name not in plan_nodes}
