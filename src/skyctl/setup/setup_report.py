"""What came of each node: frozen, printed as a table or as JSON."""

from __future__ import annotations

from typing import Literal

from skyctl.errors import SkyctlError
from skyctl.records.base import Bytes, Name, Record, Seconds, Seq

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
    """All nodes, in inventory order."""

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
