"""A run in this process's charge: the claim to it, what is written down of it, the sessions on its nodes.

There are two ways to get one: ``begun``, a new run; ``taken``, one whose supervisor is gone or has let it go.
Whoever leaves it behind for another process (``leave``) leaves its nodes as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from skyctl.control.connect import close_all, uninterrupted
from skyctl.errors import SessionGoneError, SkyctlError
from skyctl.files import RunPaths
from skyctl.records.cluster import Cluster
from skyctl.records.run import ENDED, NodeSession, RunState
from skyctl.remote.session import Session, Task, adopt_sessions
from skyctl.supervise.custody.ledger import Ledger, now
from skyctl.supervise.custody.orders import cluster_of, connect_of
from skyctl.supervise.custody.supervisors import Claim, claim


@dataclass
class Charge:
    """``sessions``: by node, those that are in use; the supervisor adds and removes.

    ``failures``: nodes of a run that was taken over which could not be reached, and why; their agents may
    hold, in the sessions ``unreached``. ``gone``: nodes whose sessions have ended.
    """

    claim: Claim
    ledger: Ledger
    cluster: Cluster
    sessions: dict[str, Session]
    failures: dict[str, SkyctlError] = field(default_factory=dict)
    gone: dict[str, SkyctlError] = field(default_factory=dict)
    unreached: tuple[NodeSession, ...] = ()
    left: bool = False

    @property
    def run_id(self) -> str:
        """The run's."""
        return self.ledger.paths.run_id

    @property
    def state(self) -> RunState:
        """The run's."""
        return self.ledger.state

    def leave(self) -> None:
        """Lets the sessions go, writes everything down and gives up the claim. Idempotent."""
        if self.left:
            return
        self.left = True
        with uninterrupted():  # else Ctrl-C would close those that are not let go yet
            for session in self.sessions.values():
                with suppress(SkyctlError, ValueError):
                    session.let_go()
        self.ledger.update(supervisor=None)
        self.ledger.close()
        self.claim.release()

    def ranks(self, nodes: Sequence[str]) -> dict[int, Task]:
        """By rank, its newest task on the node where the last attempt has it; agents remember earlier ones.

        Args:
            nodes: by rank, that node.
        """
        found: dict[int, Task] = {}
        for rank, node in enumerate(nodes):
            session = self.sessions.get(node)
            named = [task for task in session.tasks() if task.name == f"rank-{rank}"] if session else []
            if named:
                found[rank] = max(named, key=lambda one: one.number)
        return found

    def note_sessions(self) -> None:
        """Writes down which sessions there are, those included that may still hold on unreachable nodes."""
        there = [node_session(name, session) for name, session in sorted(self.sessions.items())]
        self.ledger.update(sessions=(*there, *self.unreached))


def node_session(name: str, session: Session) -> NodeSession:
    """How the state names a session."""
    return NodeSession(
        node=name, session=session.id, cache=str(session.hello.get("cache", "")), handled=session.watermark
    )


@contextmanager
def begun(
    cluster: Cluster,
    sessions: dict[str, Session],
    note: Callable[[str], None],
    **known: Any,
) -> Iterator[Charge]:
    """A new run. It is written down before anything is started for it, so that it can be found again.

    On the way out the sessions are closed, unless they were left. Where no attempt was begun, nothing of the
    run is kept.

    Args:
        note: told where there is no TensorBoard.
        known: fields of its state: ``workload``, ``steps``, ``cluster_file``, ``order``.
    """
    paths = RunPaths.new()
    held = claim(paths, attached=True)
    state = RunState(
        run_id=paths.run_id,
        created=now(),
        written=now(),
        cluster=cluster.name,
        supervisor=held.supervisor,
        sessions=tuple(node_session(name, session) for name, session in sorted(sessions.items())),
        **known,
    )
    ledger = Ledger.create(paths, state, note)
    ledger.sessions = sessions
    with _ending(Charge(held, ledger, cluster, sessions)) as charge:
        yield charge
    if not charge.left and not ledger.state.attempts:
        shutil.rmtree(paths.folder, ignore_errors=True)


@contextmanager
def resumed(
    held: Claim, cluster: Cluster, sessions: dict[str, Session], note: Callable[[str], None], **changes: Any
) -> Iterator[Charge]:
    """A run that has ended and is to go on, with new sessions. On the way out as ``begun``.

    Args:
        changes: of its state: ``steps``, ``order``.
    """
    ledger = Ledger.open(held.paths.run_id, note)
    ledger.sessions = sessions
    with _ending(Charge(held, ledger, cluster, sessions)) as charge:
        charge.note_sessions()
        for path in held.paths.requests.glob("*"):  # of the life before
            path.unlink(missing_ok=True)
        ledger.update(
            status="restarting", detail=None, supervisor=held.supervisor, lost={}, away=(), **changes
        )
        yield charge


@contextmanager
def taken(held: Claim, note: Callable[[str], None], say: Callable[[str], None]) -> Iterator[Charge]:
    """A run that nobody supervises. Its sessions are taken over, and closed on the way out unless left.

    Args:
        held: the claim to it.
        note: told where there is no TensorBoard.
        say: told what is being done.

    Raises:
        InputError: its state or its cluster file can't be read.
    """
    ledger = Ledger.open(held.paths.run_id, note)
    try:
        state = ledger.state
        cluster = cluster_of(state)
        known = {one.node: (one.session, ledger.upto(one.session)) for one in state.sessions}
        say(f"going back to {len(known)} nodes")
        nodes = [node for node in cluster.nodes if node.name in known]
        outcomes: Mapping[str, Session | SkyctlError] = adopt_sessions(nodes, connect_of(state), known)
    except BaseException:
        ledger.close()
        raise
    sessions = {name: one for name, one in outcomes.items() if isinstance(one, Session)}
    errors = {name: one for name, one in outcomes.items() if isinstance(one, SkyctlError)}
    ledger.sessions = sessions
    made = Charge(
        held,
        ledger,
        cluster,
        sessions,
        failures={name: one for name, one in errors.items() if not isinstance(one, SessionGoneError)},
        gone={name: one for name, one in errors.items() if isinstance(one, SessionGoneError)},
    )
    made.unreached = tuple(
        one for one in state.sessions if one.node not in sessions and one.node not in made.gone
    )
    with _ending(made) as charge:
        charge.note_sessions()
        ledger.update(supervisor=held.supervisor)
        yield charge


@contextmanager
def _ending(charge: Charge) -> Iterator[Charge]:
    """Sees to it that a run which is not left has a last word in its state, and nothing on its nodes."""
    last: dict[str, Any] = {"status": "failed", "detail": "its supervisor ended without a word"}
    try:
        yield charge
    except KeyboardInterrupt:
        last = {"status": "stopped", "detail": "interrupted"}
        raise
    except SkyctlError as exc:
        last["detail"] = exc.message
        raise
    finally:
        with uninterrupted():
            if not charge.left:
                _end(charge, last)


def _end(charge: Charge, last: dict[str, Any]) -> None:
    close_all(charge.sessions.values())
    ledger = charge.ledger
    unended = [
        node_session(name, session)
        for name, session in charge.sessions.items()
        if session.unended is not None
    ]
    with suppress(SkyctlError):
        ended = {} if ledger.state.status in ENDED else last
        ledger.update(**ended, sessions=(*unended, *charge.unreached), supervisor=None, away=())
    with suppress(SkyctlError):
        ledger.close()
    charge.claim.release()
