"""Something done on many nodes at once, each with its own end; and one task there, followed to its end."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from skyctl.errors import SkyctlError, UnfitError
from skyctl.remote.session import Session, translate
from skyctl.setup.report import NodeOutcome, failed

MODULE = "skyctl.setup.node.serve"

OnNode = Callable[[str, str, float], None]
"""Called with a node's name, what it is at, and the share that is done (below 0: it failed)."""

_LAST = {
    "made": "set up",
    "ready": "set up",
    "fine": "left alone",
    "lacking": "looked at",
    "nothing": "looked at",
}


def each_node(
    sessions: Mapping[str, Session], work: Callable[[Session], NodeOutcome], on_node: OnNode
) -> dict[str, NodeOutcome]:
    """Does it on every node at once; an error of one is its own outcome.

    The threads are not waited for where this is cut short: they end with their sessions.
    """
    ended: queue.Queue[tuple[str, NodeOutcome | BaseException]] = queue.Queue()

    def one(name: str, session: Session) -> None:
        try:
            ended.put((name, work(session)))
        except SkyctlError as exc:
            ended.put((name, failed(name, exc)))
        except BaseException as exc:  # noqa: BLE001 - handed to the caller's thread
            ended.put((name, exc))

    for name, session in sessions.items():
        threading.Thread(target=one, args=(name, session), name=f"setup {name}", daemon=True).start()
    found: dict[str, NodeOutcome] = {}
    for _ in sessions:
        name, outcome = ended.get()
        if isinstance(outcome, BaseException):
            raise outcome
        found[name] = outcome
        if outcome.status == "failed":
            on_node(name, outcome.error or "", -1)
        else:
            on_node(name, _LAST.get(outcome.status, "removed"), 1)
    return found


def ask(session: Session, payload: dict[str, Any], say: Callable[[str, float], None]) -> dict[str, Any]:
    """One task on the node to its end, as long as that takes; what it says on the way is passed on.

    Raises:
        SkyctlError: what went wrong there, or that the node is lost.
    """
    task = session.task(MODULE, payload, name=f"setup-{payload['op']}")
    last = ""
    try:
        while (event := task.recv()) is not None:
            message = event[0]
            kind = message.get("event")
            if kind == "progress":
                say(str(message["what"]), float(message["share"]))
            elif kind == "log":
                last = str(message.get("text"))
            elif kind == "result":
                return {key: value for key, value in message.items() if key != "event"}
            elif kind in ("error", "exit"):
                raise translate(session.node, message)
    except BaseException:
        with contextlib.suppress(SkyctlError):
            task.kill()
        raise
    raise UnfitError(f"node {session.node.name} gave no result of setup: {last}", node=session.node.name)
