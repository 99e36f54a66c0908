"""A run that this process supervises: its lock, its journal and the sessions on its nodes.

``new_run`` begins one, ``resumed_run`` takes up one that has ended, ``taken_over_run`` one whose supervisor
is gone. ``RunHandle.leave`` leaves it, and its nodes as they are, to another process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from skyctl.errors import SessionGoneError, SkyctlError
from skyctl.files import RunPaths
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster
from skyctl.records.run_state import ENDED, NodeSession, RunState
from skyctl.remote.agent_session import Session
from skyctl.remote.remote_task import RemoteTask
from skyctl.remote.resumable_connection import DETACH_TIMEOUT_S
from skyctl.remote.session_factory import adopt_sessions, close_sessions, ignore_interrupts
from skyctl.run.rank_spec import rank_task_name
from skyctl.supervision.run_journal import RunJournal
from skyctl.supervision.run_lock import RunLock, acquire_run_lock
from skyctl.supervision.run_settings import cluster_of, connect_of


@dataclass
class RunHandle:
    """What a process has of a run that it supervises.

    Attributes:
        sessions: by node, those that are in use; the run adds and removes.
        replaced: earlier ones of nodes that are back, which the run adds.
        failures: nodes of a run taken over that could not be reached, and why.
        gone: nodes whose sessions have ended, and why.
        unreached: sessions whose agents may still be there, on nodes that could not be reached.
        left: it was left to another process.
        note: told of nodes that are waited for at the end, and of those that could not be told to end.
    """

    lock: RunLock
    journal: RunJournal
    cluster: Cluster
    sessions: dict[str, Session]
    replaced: list[Session] = field(default_factory=list)
    failures: dict[str, SkyctlError] = field(default_factory=dict)
    gone: dict[str, SkyctlError] = field(default_factory=dict)
    unreached: tuple[NodeSession, ...] = ()
    left: bool = False
    note: Callable[[str], None] = lambda _text: None

    @property
    def run_id(self) -> str:
        """The name of the run, and of its folder."""
        return self.journal.paths.run_id

    @property
    def state(self) -> RunState:
        """The run's state as last told to its journal."""
        return self.journal.state

    def leave(self) -> None:
        """Detaches from the sessions, writes everything down and releases the lock. Idempotent."""
        if self.left:
            return
        self.left = True
        with ignore_interrupts():  # else Ctrl-C would close those that are not detached yet
            for session in self.sessions.values():
                with suppress(SkyctlError, ValueError):
                    session.detach()
        self.journal.update(supervisor=None)
        self.journal.close()
        self.lock.release()

    def ranks(self, nodes: Sequence[str]) -> dict[int, RemoteTask]:
        """By rank, its newest task on the node where the last attempt has it; agents remember earlier ones.

        Args:
            nodes: by rank, that node.
        """
        found: dict[int, RemoteTask] = {}
        for rank, node in enumerate(nodes):
            session = self.sessions.get(node)
            name = rank_task_name(rank)
            named = [task for task in session.tasks() if task.name == name] if session else []
            if named:
                found[rank] = max(named, key=lambda one: one.number)
        return found

    def note_sessions(self) -> None:
        """Writes down which sessions there are, with those that may still live on unreachable nodes."""
        there = [node_session(name, session) for name, session in sorted(self.sessions.items())]
        self.journal.update(sessions=(*there, *self.unreached))


OnDetach = Callable[[RunHandle], object]
"""What to do with a run that is to go on without this process."""


def node_session(name: str, session: Session) -> NodeSession:
    """The session as the run's state names it."""
    return NodeSession(node=name, session=session.id, cache=session.hello.cache, handled=session.watermark)


@contextmanager
def new_run(
    cluster: Cluster,
    sessions: dict[str, Session],
    note: Callable[[str], None],
    **known: Any,
) -> Iterator[RunHandle]:
    """A new run. It is written down before anything is started for it, so that it can be found again.

    On the way out the sessions are closed, unless they were left. Where no attempt was begun, nothing of the
    run is kept.

    Args:
        note: told where there is no TensorBoard, and of nodes that can't be told to end.
        known: fields of its state: ``workload``, ``steps``, ``cluster_file``, ``order``.
    """
    paths = RunPaths.new()
    lock = acquire_run_lock(paths, attached=True)
    state = RunState(
        run_id=paths.run_id,
        created=timestamp("milliseconds"),
        written=timestamp("milliseconds"),
        cluster=cluster.name,
        supervisor=lock.supervisor,
        sessions=tuple(node_session(name, session) for name, session in sorted(sessions.items())),
        **known,
    )
    journal = RunJournal.create(paths, state, note)
    journal.sessions = sessions
    with _ending(RunHandle(lock, journal, cluster, sessions, note=note)) as handle:
        yield handle
    if not handle.left and not journal.state.attempts:
        shutil.rmtree(paths.folder, ignore_errors=True)


@contextmanager
def resumed_run(
    lock: RunLock, cluster: Cluster, sessions: dict[str, Session], note: Callable[[str], None], **changes: Any
) -> Iterator[RunHandle]:
    """A run that has ended and is resumed, with new sessions. On the way out as ``new_run``.

    Args:
        changes: of its state: ``steps``, ``order``.
    """
    journal = RunJournal.open(lock.paths.run_id, note)
    journal.sessions = sessions
    with _ending(RunHandle(lock, journal, cluster, sessions, note=note)) as handle:
        handle.note_sessions()
        for path in lock.paths.requests.glob("*"):  # left before it ended
            path.unlink(missing_ok=True)
        journal.update(
            status="restarting",
            detail=None,
            cluster=cluster.name,
            supervisor=lock.supervisor,
            lost={},
            untrusted=(),
            away=(),
            **changes,
        )
        yield handle


@contextmanager
def taken_over_run(
    lock: RunLock, note: Callable[[str], None], say: Callable[[str], None]
) -> Iterator[RunHandle]:
    """A run that nobody supervises. Its sessions are taken over, and closed on the way out unless left.

    Args:
        lock: the run's, held by this process.
        note: told where there is no TensorBoard, and of nodes that can't be told to end.
        say: told what is being done.

    Raises:
        InputError: its state or its cluster file can't be read.
    """
    journal = RunJournal.open(lock.paths.run_id, note)
    try:
        state = journal.state
        cluster = cluster_of(state)
        known = {one.node: (one.session, journal.upto(one.session)) for one in state.sessions}
        say(f"going back to {len(known)} nodes")
        nodes = [node for node in cluster.nodes if node.name in known]
        outcomes: Mapping[str, Session | SkyctlError] = adopt_sessions(nodes, connect_of(state), known)
    except BaseException:
        journal.close()
        raise
    sessions = {name: one for name, one in outcomes.items() if isinstance(one, Session)}
    errors = {name: one for name, one in outcomes.items() if isinstance(one, SkyctlError)}
    journal.sessions = sessions
    made = RunHandle(
        lock,
        journal,
        cluster,
        sessions,
        failures={name: one for name, one in errors.items() if not isinstance(one, SessionGoneError)},
        gone={name: one for name, one in errors.items() if isinstance(one, SessionGoneError)},
        note=note,
    )
    made.unreached = tuple(
        one for one in state.sessions if one.node not in sessions and one.node not in made.gone
    )
    with _ending(made) as handle:
        handle.note_sessions()
        journal.update(supervisor=lock.supervisor)
        yield handle


@contextmanager
def _ending(handle: RunHandle) -> Iterator[RunHandle]:
    """Makes sure that a run which is not left ends: its state says how, and its nodes have nothing of it."""
    last: dict[str, Any] = {"status": "failed", "detail": "its supervisor ended without a word"}
    try:
        yield handle
    except KeyboardInterrupt:
        last = {"status": "stopped", "detail": "interrupted"}
        raise
    except SkyctlError as exc:
        last["detail"] = exc.message
        raise
    finally:
        with ignore_interrupts():
            if not handle.left:
                _end(handle, last)


def _end(handle: RunHandle, last: dict[str, Any]) -> None:
    sessions = [*handle.sessions.items(), *((session.node.name, session) for session in handle.replaced)]
    for name, session in sessions:
        if session.lost is None and not session.is_waited_for:
            handle.note(
                f"waiting {DETACH_TIMEOUT_S:.0f} s for node {name}, which is not heard, "
                "to end what it has of this run"
            )
    close_sessions(session for _, session in sessions)
    journal = handle.journal
    unended = []
    for name, session in sessions:
        if (failure := session.shutdown_failure) is not None:
            unended.append(node_session(name, session))
            handle.note(f"{failure.message}; {failure.hint}, or by `skyctl stop {handle.run_id}` before")
    with suppress(SkyctlError):
        ended = {} if journal.state.status in ENDED else last
        journal.update(**ended, sessions=(*unended, *handle.unreached), supervisor=None, away=())
    with suppress(SkyctlError):
        journal.close()
    handle.lock.release()
