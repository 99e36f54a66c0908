"""One node, one connection, one agent, many tasks.

A session is opened with ``open_session`` (or many with ``open_sessions``) and must be closed: then nothing of
it is left on the node but the cache. If the launcher dies instead, the agent sees its input end and does the
same. With ``ConnectOptions.hold_s`` it goes on instead: the session outlives its connections, which are
dialled again (``redial_s``), and its launcher, from which another can take it over (``adopt_session``).
"""

from __future__ import annotations

import contextlib
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from skyctl.errors import SkyctlError
from skyctl.records.cluster import Node
from skyctl.remote.agentsession import CLOSE_S, Connector, Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.bootstrap import attach_agent, start_agent
from skyctl.remote.connect import connect
from skyctl.remote.nursery import connector_for
from skyctl.remote.tasks import Task
from skyctl.remote.translate import translate

__all__ = [
    "Session",
    "Task",
    "adopt_session",
    "adopt_sessions",
    "open_session",
    "open_sessions",
    "translate",
]

JITTER_S = 0.1
Outcomes = dict[str, Session | SkyctlError]
Progress = Callable[[str, Session | SkyctlError], None]


def open_session(node: Node, options: ConnectOptions, connector: Connector = connect) -> Session:
    """Connects to the node and starts an agent there. Errors name the node; nothing is left after one."""
    owner = secrets.token_hex(16)
    remote = connector(node, options)
    try:
        channel, hello = start_agent(remote, options, owner)
        return Session(remote, channel, hello, options, connector=connector, owner=owner)
    except BaseException:
        remote.close()
        raise


def adopt_session(
    node: Node, options: ConnectOptions, session_id: str, after_seq: int, connector: Connector = connect
) -> Session:
    """Takes a session over from a launcher that is gone (or that is to be: it loses the session).

    Args:
        after_seq: its ``watermark`` there; events after it come, without gap or repeat. Those that the
            launcher had acknowledged to the node by then do not, whatever is said here.

    Raises:
        SessionGoneError: it has ended, or never was.
        NodeError: as ``open_session``.
    """
    owner = secrets.token_hex(16)
    words = {"owner": owner, "adopt": True, "n": after_seq, "r": 0}
    remote = connector(node, options)
    try:
        channel, hello = attach_agent(remote, options, session_id, words)
        return Session(remote, channel, hello, options, connector=connector, owner=owner, adopted=True)
    except BaseException:
        remote.close()
        raise


def open_sessions(
    nodes: Iterable[Node],
    options: ConnectOptions,
    on_progress: Progress | None = None,
    limit: int = 8,
    connector: Connector | None = None,
) -> Outcomes:
    """Opens a session with every node, ``limit`` at a time (sshd's MaxStartups begins to refuse at 10).

    Returns:
        an outcome per node, in the nodes' order; an error of one is no other's.

    Local nodes that are alike share a nursery (``remote/nursery.py``), unless a connector is given.
    On an interrupt those opened by then, and those opened after, are closed.
    """
    nodes = list(nodes)
    with contextlib.nullcontext(connector) if connector else connector_for(nodes) as dialled:
        open_one = partial(open_session, options=options, connector=dialled)
        return _open_all(nodes, open_one, Session.close, on_progress, limit, held=options.hold_s > 0)


def adopt_sessions(
    nodes: Iterable[Node],
    options: ConnectOptions,
    known: Mapping[str, tuple[str, int]],
    on_progress: Progress | None = None,
    limit: int = 8,
    connector: Connector = connect,
) -> Outcomes:
    """As ``open_sessions``, with the sessions there are; on an interrupt they are let go of again.

    Args:
        known: by node name, the session's id and the watermark to go on from (``adopt_session``).
    """

    def adopt_one(node: Node) -> Session:
        return adopt_session(node, options, *known[node.name], connector)

    return _open_all(list(nodes), adopt_one, Session.let_go, on_progress, limit, held=True)


def _open_all(
    nodes: list[Node],
    open_one: Callable[[Node], Session],
    undo: Callable[[Session], None],
    on_progress: Progress | None,
    limit: int,
    *,
    held: bool,
) -> Outcomes:
    """``held``: one that is opened just now would outlive us, so an interrupt waits for it, too."""
    given_up = threading.Event()
    waiting: queue.SimpleQueue[tuple[int, Node]] = queue.SimpleQueue()
    for index, node in enumerate(nodes):
        waiting.put((index, node))
    results: queue.SimpleQueue[tuple[Node, Session | BaseException]] = queue.SimpleQueue()

    def dial() -> None:
        while not given_up.is_set():
            try:
                index, node = waiting.get_nowait()
            except queue.Empty:
                return
            given_up.wait(random.uniform(0, JITTER_S) if index else 0)  # noqa: S311 - spreads dials, no secret
            try:
                session = open_one(node)
            except BaseException as exc:  # noqa: BLE001 - handed to the caller's thread
                results.put((node, exc))
                continue
            if given_up.is_set():
                undo(session)
            results.put((node, session))

    threads = [threading.Thread(target=dial, name="dial", daemon=True) for _ in range(min(limit, len(nodes)))]
    outcomes: Outcomes = {}
    try:
        for thread in threads:
            thread.start()
        for _ in nodes:
            node, outcome = results.get()
            if not isinstance(outcome, Session | SkyctlError):
                raise outcome
            outcomes[node.name] = outcome
            if on_progress:
                on_progress(node.name, outcome)
    except BaseException:
        given_up.set()
        opened: list[Session | BaseException] = list(outcomes.values())
        while not results.empty():
            opened.append(results.get()[1])
        _undo_all(opened, undo)
        deadline = time.monotonic() + CLOSE_S + 5
        for thread in [thread for thread in threads if held and thread.ident]:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    return {node.name: outcomes[node.name] for node in nodes}


def _undo_all(outcomes: Iterable[Session | BaseException], undo: Callable[[Session], None]) -> None:
    """Closes (or lets go of) those that are sessions, all at once."""
    threads = [
        threading.Thread(target=undo, args=(outcome,), daemon=True)
        for outcome in outcomes
        if isinstance(outcome, Session)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CLOSE_S + 5)
