"""Opening sessions: over the connection that a node names, one at a time or many, new or taken over.

A session is opened with ``open_session`` (or many with ``open_sessions``) and must be closed: then nothing of
it is left on the node but the cache. If the launcher dies instead, the agent sees its input end and does the
same. With ``ConnectOptions.hold_s`` the session outlives its connections, which are dialled again
(``redial_s``), and its launcher, from which another can take it over (``adopt_session``).
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from skyctl.agent.process_tree import SESSION_TAG
from skyctl.errors import SkyctlError
from skyctl.records.cluster import Node
from skyctl.remote.agent_messages import EVENTS
from skyctl.remote.agent_session import CLOSE_TIMEOUT_S, Connector, Session
from skyctl.remote.base import ConnectOptions, NodeConnection
from skyctl.remote.bootstrap import attach_agent, node_python, start_agent
from skyctl.remote.forkserver_client import PRELOADED_MODULES, ForkedConnection, ForkServerClient
from skyctl.remote.task_group import TaskGroup

DIAL_JITTER_S = 0.1
SessionOutcomes = dict[str, Session | SkyctlError]
OnSessionOutcome = Callable[[str, Session | SkyctlError], None]


def connect_node(node: Node, options: ConnectOptions) -> NodeConnection:
    """Connects as the node's ``transport`` says. Raises NodeError, or InputError for an unusable key file."""
    if node.transport == "local":
        from skyctl.remote.local import LocalConnection

        return LocalConnection(node)
    from skyctl.remote.ssh import SshConnection

    return SshConnection(node, options)


def forkable_nodes(nodes: Sequence[Node]) -> set[str]:
    """The nodes that one fork server can serve: local, with our own Python and environment; at least two."""
    if not sys.platform.startswith("linux") or SESSION_TAG in os.environ:
        return set()
    names = {
        node.name
        for node in nodes
        if node.transport == "local" and not node.env and node_python(node) == sys.executable
    }
    return names if len(names) > 1 else set()


@contextlib.contextmanager
def make_connector(
    nodes: Sequence[Node],
    cluster_nodes: Sequence[Node] | None = None,
    preloaded: Sequence[str] = PRELOADED_MODULES,
) -> Iterator[Connector]:
    """``connect_node``, with a fork server for the nodes that can use one, which lives as long as they do.

    The server imports its modules from now on: who has to import torch as well does so meanwhile.

    Args:
        cluster_nodes: the whole cluster (None: these are all of it), by which it is decided which nodes are:
            one that was forked when all were measured is forked when it trains alone, too, or the measurement
            of its memory would not hold.
        preloaded: the modules that the server imports.
    """
    served = forkable_nodes(nodes if cluster_nodes is None else cluster_nodes) & {node.name for node in nodes}
    forkserver = None
    if served:
        with contextlib.suppress(OSError, ValueError):
            forkserver = ForkServerClient(preloaded)
    if forkserver is None:
        yield connect_node
        return

    def connect_or_fork(node: Node, options: ConnectOptions) -> NodeConnection:
        return ForkedConnection(node, forkserver) if node.name in served else connect_node(node, options)

    try:
        yield connect_or_fork
    except BaseException:
        forkserver.shut_down()
        raise
    finally:
        forkserver.release()


def open_session(node: Node, options: ConnectOptions, connector: Connector = connect_node) -> Session:
    """Connects to the node and starts an agent there. Errors name the node; nothing is left after one."""
    owner = secrets.token_hex(16)
    node_connection = connector(node, options)
    try:
        channel, hello = start_agent(node_connection, options, owner)
        return Session(node_connection, channel, hello, options, connector=connector, owner=owner)
    except BaseException:
        node_connection.close()
        raise


def adopt_session(
    node: Node, options: ConnectOptions, session_id: str, after_seq: int, connector: Connector = connect_node
) -> Session:
    """Takes a session over from a launcher that is gone, or that loses the session by this.

    Args:
        after_seq: the former launcher's ``watermark``; the events after it arrive, without gap or repeat,
            except those that it had acknowledged to the node.

    Raises:
        SessionGoneError: it has ended, or never was.
        NodeError: as ``open_session``.
    """
    owner = secrets.token_hex(16)
    node_connection = connector(node, options)
    try:
        channel, hello = attach_agent(
            node_connection, options, session_id, owner, {EVENTS: after_seq}, adopt=True
        )
        return Session(
            node_connection, channel, hello, options, connector=connector, owner=owner, adopted=True
        )
    except BaseException:
        node_connection.close()
        raise


def open_sessions(
    nodes: Iterable[Node],
    options: ConnectOptions,
    on_progress: OnSessionOutcome | None = None,
    limit: int = 8,
    connector: Connector | None = None,
    cluster_nodes: Sequence[Node] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> SessionOutcomes:
    """Opens a session with every node; dials ``limit`` at a time (sshd's MaxStartups begins to refuse at 10).

    Args:
        cluster_nodes: the whole cluster, where these nodes are only a part.
        meanwhile: called while the nodes are dialled; what it raises counts as an interrupt.

    Returns:
        A session or an error for each node, in the nodes' order.

    Local nodes are forked from one process where the cluster has several (``make_connector``), unless a
    connector is given. On an interrupt the sessions opened by then, and those opened after, are closed.
    """
    nodes = list(nodes)
    with contextlib.nullcontext(connector) if connector else make_connector(nodes, cluster_nodes) as dialled:
        open_one = partial(open_session, options=options, connector=_limited(dialled, limit))
        return _open_all(nodes, open_one, Session.close, on_progress, meanwhile, resumable=options.hold_s > 0)


def adopt_sessions(
    nodes: Iterable[Node],
    options: ConnectOptions,
    earlier: Mapping[str, tuple[str, int]],
    on_progress: OnSessionOutcome | None = None,
) -> SessionOutcomes:
    """As ``open_sessions``, with sessions that exist already; on an interrupt they are detached again.

    Args:
        earlier: by node name, the session's id and the watermark to resume after (``adopt_session``).
    """

    def adopt_one(node: Node) -> Session:
        return adopt_session(node, options, *earlier[node.name], dialled)

    dialled = _limited(connect_node, 8)
    return _open_all(list(nodes), adopt_one, Session.detach, on_progress, resumable=True)


def close_sessions(sessions: Iterable[Session]) -> None:
    """Closes all at once. It is bounded, and Ctrl-C must not cut it short: nothing may stay behind."""
    sessions = list(sessions)
    with ignore_interrupts(), ThreadPoolExecutor(max_workers=max(1, len(sessions))) as pool:
        list(pool.map(Session.close, sessions))


@contextlib.contextmanager
def ignore_interrupts() -> Iterator[None]:
    """While it lasts, Ctrl-C does nothing: for what is bounded and must be done to its end."""
    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda *_: None) if ours else None  # a wake-up descriptor hears it
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _limited(connector: Connector, limit: int) -> Connector:
    """The connector, for so many at a time."""
    slots = threading.BoundedSemaphore(limit)

    def dial(node: Node, options: ConnectOptions) -> NodeConnection:
        with slots:
            return connector(node, options)

    return dial


def _open_all(
    nodes: list[Node],
    open_one: Callable[[Node], Session],
    undo: Callable[[Session], None],
    on_progress: OnSessionOutcome | None,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    resumable: bool,
) -> SessionOutcomes:
    """Opens all sessions at the same time; on an interrupt all of them are undone.

    ``resumable``: a session that is just being opened would outlive this process, so an interrupt waits for
    it.
    """
    interrupted = threading.Event()
    group: TaskGroup[str] = TaskGroup("dial")

    def dial(index: int, node: Node) -> Session | None:
        interrupted.wait(random.uniform(0, DIAL_JITTER_S) if index else 0)  # noqa: S311 - no secret
        if interrupted.is_set():
            return None
        session = open_one(node)
        if interrupted.is_set():
            undo(session)
        return session

    outcomes: SessionOutcomes = {}
    left = len(nodes)
    try:
        for index, node in enumerate(nodes):
            group.run(node.name, partial(dial, index, node))
        meanwhile()
        while left and (event := group.receive()) is not None:
            left -= 1
            outcome = event.error or event.value
            if not isinstance(outcome, Session | SkyctlError):
                raise outcome
            outcomes[event.key] = outcome
            if on_progress:
                on_progress(event.key, outcome)
    except BaseException:
        interrupted.set()
        opened: list[object] = list(outcomes.values())
        while (event := group.receive(0)) is not None:
            left -= 1
            opened.append(event.value)
        _undo_all(opened, undo)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S + 5
        while resumable and left and (event := group.receive(max(0.0, deadline - time.monotonic()))):
            left -= 1
            if isinstance(event.value, Session):
                undo(event.value)  # idempotent: its thread may have done so
        raise
    return {node.name: outcomes[node.name] for node in nodes}


def _undo_all(opened: Iterable[object], undo: Callable[[Session], None]) -> None:
    """Closes or detaches the sessions among them, all at once."""
    threads = [
        threading.Thread(target=undo, args=(session,), daemon=True)
        for session in opened
        if isinstance(session, Session)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CLOSE_TIMEOUT_S + 5)
