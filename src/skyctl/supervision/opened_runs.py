"""Opening a run that this process is to play, and what becomes of it on the way out.

``new_run`` begins one, ``resumed_run`` takes up one that has ended, ``taken_over_run`` one whose supervisor
is gone. Each ends what the run has on its nodes, unless it was left to another process (``LiveRun.leave``).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from skyctl.errors import SessionGoneError, SkyctlError
from skyctl.files import RunPaths
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster
from skyctl.records.run_state import ENDED, NodeSession, RunState
from skyctl.remote.agent_session import Session
from skyctl.remote.resumable_connection import DETACH_TIMEOUT_S
from skyctl.remote.session_factory import adopt_sessions, close_sessions, ignore_interrupts
from skyctl.run.live_run import LiveRun
from skyctl.run.run_lock import RunLock, acquire_run_lock
from skyctl.supervision.run_journal import RunJournal
from skyctl.supervision.run_settings import cluster_of, connect_of

Note = Callable[[str], None]
"""Told where there is no TensorBoard, of nodes that are waited for, and of those that can't be ended."""
OnDetach = Callable[[LiveRun], object]
"""Called with a run that is to go on without this process."""


def node_session(name: str, session: Session) -> NodeSession:
    """A node's session as the run's state keeps it, so that another process can take it over."""
    return NodeSession(node=name, session=session.id, cache=session.hello.cache, handled=session.watermark)


@contextmanager
def new_run(
    cluster: Cluster,
    sessions: dict[str, Session],
    note: Note,
    **fields: Any,
) -> Iterator[LiveRun]:
    """A new run. It is written down before anything is started for it, so that it can be found again.

    On the way out the sessions are closed, unless they were left. If no attempt was begun, nothing of the
    run is kept.

    Args:
        fields: of its state: ``workload``, ``steps``, ``cluster_file``, ``order``.
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
        **fields,
    )
    journal = RunJournal.create(paths, state, note)
    journal.sessions = sessions
    run = LiveRun(journal, cluster, sessions, lock=lock)
    with _ending(run, note):
        yield run
    if not run.left and not journal.state.attempts:
        shutil.rmtree(paths.folder, ignore_errors=True)


@contextmanager
def resumed_run(
    lock: RunLock, cluster: Cluster, sessions: dict[str, Session], note: Note, **changes: Any
) -> Iterator[LiveRun]:
    """A run that has ended and is resumed, with new sessions. On the way out as ``new_run``.

    Args:
        changes: of its state: ``steps``, ``order``.
    """
    journal = RunJournal.open(lock.paths.run_id, note)
    journal.sessions = sessions
    run = LiveRun(journal, cluster, sessions, lock=lock)
    with _ending(run, note):
        note_sessions(run)
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
            stopped_early=False,
            **changes,
        )
        yield run


@contextmanager
def taken_over_run(lock: RunLock, note: Note, say: Callable[[str], None]) -> Iterator[LiveRun]:
    """A run that nobody supervises. Its sessions are taken over, and closed on the way out unless left.

    Args:
        lock: the run's, held by this process.
        say: told what is being done.

    Raises:
        InputError: its state or its cluster file can't be read.
    """
    journal = RunJournal.open(lock.paths.run_id, note)
    try:
        state = journal.state
        cluster = cluster_of(state)
        handled = {noted.node: (noted.session, journal.upto(noted.session)) for noted in state.sessions}
        say(f"going back to {len(handled)} nodes")
        nodes = [node for node in cluster.nodes if node.name in handled]
        outcomes: Mapping[str, Session | SkyctlError] = adopt_sessions(nodes, connect_of(state), handled)
    except BaseException:
        journal.close()
        raise
    sessions = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Session)}
    missing = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, SkyctlError)}
    missing = dict(sorted(missing.items(), key=lambda item: isinstance(item[1], SessionGoneError)))
    journal.sessions = sessions
    gone = [name for name, error in missing.items() if isinstance(error, SessionGoneError)]
    unreached = tuple(s for s in state.sessions if s.node not in sessions and s.node not in gone)
    run = LiveRun(journal, cluster, sessions, lock=lock, missing=missing, unreached=unreached)
    with _ending(run, note):
        note_sessions(run)
        journal.update(supervisor=lock.supervisor)
        yield run


def note_sessions(run: LiveRun) -> None:
    """Writes down which sessions there are, with those that may still live on unreachable nodes."""
    sessions = tuple(node_session(name, session) for name, session in sorted(run.sessions.items()))
    run.journal.update(sessions=(*sessions, *run.unreached))


@contextmanager
def _ending(run: LiveRun, note: Note) -> Iterator[None]:
    """Makes sure that a run which is not left ends: its state says how, and its nodes have nothing of it."""
    last: dict[str, Any] = {"status": "failed", "detail": "its supervisor ended without a word"}
    try:
        yield
    except KeyboardInterrupt:
        last = {"status": "stopped", "detail": "interrupted"}
        raise
    except SkyctlError as exc:
        last["detail"] = exc.message
        raise
    finally:
        with ignore_interrupts():
            if not run.left:
                _end(run, note, last)


def _end(run: LiveRun, note: Note, last: dict[str, Any]) -> None:
    sessions = [*run.sessions.items(), *((session.node.name, session) for session in run.replaced)]
    for name, session in sessions:
        if session.lost is None and not session.is_waited_for:
            note(
                f"waiting {DETACH_TIMEOUT_S:.0f} s for node {name}, which is not heard, "
                "to end what it has of this run"
            )
    close_sessions(session for _, session in sessions)
    unended = []
    for name, session in sessions:
        if (failure := session.shutdown_failure) is not None:
            unended.append(node_session(name, session))
            note(f"{failure.message}; {failure.hint}, or by `skyctl stop {run.run_id}` before")
    journal = run.journal
    with suppress(SkyctlError):
        ended = {} if journal.state.status in ENDED else last
        journal.update(**ended, sessions=(*unended, *run.unreached), supervisor=None, away=())
    with suppress(SkyctlError):
        journal.close()
    if run.lock is not None:
        run.lock.release()
