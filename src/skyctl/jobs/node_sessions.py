"""Sessions on a cluster's nodes for the time of one command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from skyctl.errors import InputError, NodeError, SkyctlError
from skyctl.records.cluster import Node
from skyctl.remote.agent_session import Connector, Session
from skyctl.remote.base import ConnectOptions
from skyctl.remote.session_factory import close_sessions, open_sessions


@dataclass(frozen=True)
class NodeSessions:
    """The session of each node that answered, and the error of each that did not, in inventory order."""

    sessions: dict[str, Session]
    failures: dict[str, SkyctlError]


@contextmanager
def connect_nodes(
    nodes: Sequence[Node],
    options: ConnectOptions,
    on_progress: Callable[[str], None] | None = None,
    of: Sequence[Node] | None = None,
    connector: Connector | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[NodeSessions]:
    """Opens one session a node; on the way out, however that comes, closes them all.

    Args:
        meanwhile: called while the nodes are dialled; what it raises ends that.
        of: all nodes of the cluster, where these are some of them: it decides who is alike
            (``remote/session_factory.py``).
        connector: what ``make_connector`` has made of these nodes already; None: it is made now.
    """
    if on_progress is not None:
        on_progress(f"connecting to {len(nodes)} nodes")
    outcomes = open_sessions(nodes, options, connector=connector, cluster_nodes=of, meanwhile=meanwhile)
    sessions = {name: o for name, o in outcomes.items() if not isinstance(o, SkyctlError)}
    try:
        yield NodeSessions(sessions, {n: o for n, o in outcomes.items() if isinstance(o, SkyctlError)})
    finally:
        close_sessions(sessions.values())
    for name, session in sessions.items():
        if session.surviving_pids:
            raise NodeError(
                f"on node {name} these processes could not be ended: "
                f"{', '.join(map(str, session.surviving_pids))}",
                node=name,
                hint="end them there",
            )


def require_all(failures: dict[str, SkyctlError]) -> None:
    """Raises the one failure, or one error that lists them all (exit 4, unless all are bad input)."""
    if not failures:
        return
    if len(failures) == 1:
        raise next(iter(failures.values()))
    lines = "".join(f"\n  {name}: {error.message}" for name, error in failures.items())
    hints = {error.hint for error in failures.values() if error.hint}
    hint = next(iter(hints)) if len(hints) == 1 else "skyctl check shows what to do about each"
    message = f"{len(failures)} nodes can't be used:{lines}"
    if all(isinstance(error, InputError) for error in failures.values()):
        raise InputError(message, hint=hint)
    raise NodeError(message, node=next(iter(failures)), hint=hint)
