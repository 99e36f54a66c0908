"""What a task says went wrong, as one of our errors, with the node named."""

from __future__ import annotations

import errno
from typing import Any

from skyctl import errors
from skyctl.errors import NodeError, RunError, SkyctlError, UnfitError
from skyctl.records.cluster import Node

TAIL_LINES = 20


def translate(node: Node, event: dict[str, Any]) -> SkyctlError:
    """An ``error`` or ``exit`` event of a task on that node → the error to raise.

    The task's traceback, or the last lines it printed, are the error's notes.
    """
    failure = _of_exit(node, event) if event.get("event") == "exit" else _of_error(node, event)
    detail = event.get("traceback") or "\n".join((event.get("tail") or [])[-TAIL_LINES:])
    if detail:
        failure.add_note(f"on node {node.name}:\n{detail.rstrip()}")
    return failure


def _of_exit(node: Node, event: dict[str, Any]) -> SkyctlError:
    last = next((line for line in reversed(event.get("tail") or []) if line.strip()), None)
    said = f"; its last line: {last.strip()[:300]}" if last else ""
    if event.get("agent_ended"):
        why = f"its agent there was ending: {event['agent_ended']}"
        return RunError(f"a process on node {node.name} was ended, {why}{said}")
    if event.get("signal"):
        hint = "SIGKILL often is the system short of memory" if event["signal"] == "SIGKILL" else None
        return RunError(f"a process on node {node.name} was ended by {event['signal']}{said}", hint=hint)
    return RunError(
        f"a process on node {node.name} ended with status {event.get('returncode')} and gave no result{said}"
    )


def _of_error(node: Node, event: dict[str, Any]) -> SkyctlError:
    kind, message = str(event.get("type")), str(event.get("message"))
    if event.get("skyctl"):
        return _ours(node, kind, message, event.get("hint"), event.get("exit_code"))
    python = event.get("python") or node.python
    module = (event.get("module") or "").partition(".")[0]
    if kind == "ModuleNotFoundError" and module and module != "skyctl":
        return UnfitError(
            f"node {node.name} has no {module} in {python}",
            node=node.name,
            hint=f"install {module} there, or name a Python that has it in cluster.yaml: `python: /path`",
        )
    if event.get("errno") in (errno.ENOSPC, errno.EDQUOT):
        return UnfitError(
            f"a disk of node {node.name} is full: {message}", node=node.name, hint="make room there"
        )
    if kind in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in message:
        return UnfitError(
            f"node {node.name} has too little memory: {message or kind}",
            node=node.name,
            hint="end what else runs there, or lower `memory_gib` in cluster.yaml and plan again",
        )
    return RunError(f"on node {node.name}: {kind}: {message}" if message else f"on node {node.name}: {kind}")


def _ours(node: Node, kind: str, message: str, hint: str | None, exit_code: int | None) -> SkyctlError:
    by_code: dict[int, type[SkyctlError]] = {2: errors.InputError, 4: UnfitError, 5: errors.MismatchError}
    cls = by_code.get(exit_code or 1, RunError)
    named = getattr(errors, kind, None)
    if isinstance(named, type) and issubclass(named, SkyctlError):
        cls = named
    text = message if node.name in message else f"on node {node.name}: {message}"
    if issubclass(cls, NodeError):
        return cls(text, node=node.name, hint=hint)
    return cls(text, hint=hint)
