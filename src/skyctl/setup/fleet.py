"""Setup on many nodes at once, each with its own outcome; and one task there, followed to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from skyctl.agent.task_events import LogEvent, read_as_json, read_event, unknown_event
from skyctl.agent.task_orders import write_order
from skyctl.errors import SkyctlError, UnfitError
from skyctl.records.base import Bytes, Name, Record, Seconds, Seq
from skyctl.remote.agent_session import Session
from skyctl.remote.remote_task import translate_task_failure
from skyctl.remote.task_group import TaskGroup
from skyctl.setup.node.setup_events import ANSWERS, SetupProgress
from skyctl.setup.node.setup_orders import SetupOrder

SETUP_TASK_MODULE = "skyctl.setup.node.setup_task"

ReportNodeProgress = Callable[[str, str, float], None]
"""Called with a node's name, what it is doing, and what share is done (1: it has ended, < 0: failed)."""
UNFINISHED_SHARE = 0.99
"""The largest share of a node that has not ended."""

_FINISHED_LABELS = {
    "made": "set up",
    "ready": "set up",
    "fine": "left alone",
    "lacking": "looked at",
    "nothing": "looked at",
}


Status = Literal["fine", "ready", "made", "lacking", "removed", "nothing", "failed"]
"""fine: lacks nothing; ready: set up already; made: set up now; lacking: it would be (``--dry-run``);
removed; nothing: there was nothing to remove; failed."""


class NodeOutcome(Record):
    """One node. ``python``: the one used there from now on; ``lacks``: what it lacked, in words."""

    node: Name
    status: Status
    python: str | None = None
    torch: str | None = None
    lacks: Seq[str] = ()
    environment: str | None = None
    size_bytes: Bytes | None = None
    took_s: Seconds | None = None
    pushed: bool = False
    note: str | None = None
    error: str | None = None
    hint: str | None = None


class SetupReport(Record):
    """The outcome of ``skyctl setup``; ``nodes``: one outcome for each, in inventory order."""

    cluster: Name
    ok: bool
    torch: Name
    requirements: Seq[str]
    nodes: Seq[NodeOutcome]


def failed_outcome(node: str, error: SkyctlError, **more: object) -> NodeOutcome:
    """A node that could not be set up, or not be rid of it."""
    return NodeOutcome.model_validate(
        {"node": node, "status": "failed", "error": error.message, "hint": error.hint, **more}
    )


def each_node(
    work: Mapping[str, Callable[[], NodeOutcome]], on_node: ReportNodeProgress
) -> dict[str, NodeOutcome]:
    """Does each node's work at once; an error of one is its own outcome.

    The threads are not waited for where this is cut short: they end with their sessions.
    """
    group: TaskGroup[str] = TaskGroup("setup")
    for name, task in work.items():
        group.run(name, task)
    found: dict[str, NodeOutcome] = {}
    for _ in work:
        name, outcome = group.wait_outcome()
        if isinstance(outcome, SkyctlError):
            outcome = failed_outcome(name, outcome)
        found[name] = outcome
        if outcome.status == "failed":
            on_node(name, outcome.error or "", -1)
        else:
            on_node(name, _FINISHED_LABELS.get(outcome.status, "removed"), 1)
    return found


def run_setup_task(session: Session, order: SetupOrder, say: Callable[[str, float], None]) -> dict[str, Any]:
    """One task on the node to its end, as long as that takes; what it says on the way is passed on.

    Raises:
        ProtocolError: the node sends what setup never does.
        SkyctlError: what went wrong there, or that the node is lost.
    """
    task = session.start_task(SETUP_TASK_MODULE, write_order(order), name=f"setup-{order.kind}")
    last = ""
    try:
        while (event := task.recv()) is not None:
            message = event[0]
            kind = message.get("event")
            if kind == "progress":
                progress = read_event(SetupProgress, message, session.node.name)
                say(progress.what, min(progress.share, UNFINISHED_SHARE))
            elif kind == "log":
                last = read_event(LogEvent, message, session.node.name).text
            elif kind == "result":
                return read_as_json(ANSWERS[order.kind], message, session.node.name)
            elif kind in ("error", "exit"):
                raise translate_task_failure(session.node, message)
            else:
                raise unknown_event(message, session.node.name)
    except BaseException:
        with contextlib.suppress(SkyctlError):
            task.kill()
        raise
    raise UnfitError(f"node {session.node.name} gave no result of setup: {last}", node=session.node.name)
