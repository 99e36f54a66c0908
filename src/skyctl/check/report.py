"""What a check found: ticks per node and per pair. Frozen; printed as a tick list or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from skyctl.errors import SkyctlError
from skyctl.records.base import Name, Record, Seconds, Seq

Status = Literal["ok", "warning", "failed", "skipped"]


class Tick(Record):
    """One thing looked at. ``found``: what is there; ``hint``: the next step, of a cross or a warning."""

    name: Name
    status: Status
    found: str | None = None
    hint: str | None = None


class NodeReport(Record):
    """One node's ticks. ``address``: what its peers reach it by; ``interface``: whose address that is."""

    node: Name
    address: str | None
    interface: str | None
    ticks: Seq[Tick]

    @property
    def ok(self) -> bool:
        """No cross."""
        return all(tick.status != "failed" for tick in self.ticks)


class PairReport(Record):
    """One node connecting to another. ``error`` is None where that works."""

    source: Name
    target: Name
    connect_s: Seconds | None = None
    error: str | None = None
    hint: str | None = None


class CheckReport(Record):
    """All nodes in inventory order, and every ordered pair that could be tried."""

    cluster: Name
    ok: bool
    nodes: Seq[NodeReport]
    pairs: Seq[PairReport]

    @property
    def crosses(self) -> int:
        """How many things failed."""
        ticks = sum(tick.status == "failed" for node in self.nodes for tick in node.ticks)
        return ticks + sum(pair.error is not None for pair in self.pairs)

    @property
    def warnings(self) -> int:
        """How many things are worth a look."""
        return sum(tick.status == "warning" for node in self.nodes for tick in node.ticks)


def ok(name: str, found: str | None = None) -> Tick:
    """A tick."""
    return Tick(name=name, status="ok", found=found)


def warning(name: str, found: str, hint: str) -> Tick:
    """Works, but is worth a look."""
    return Tick(name=name, status="warning", found=found, hint=hint)


def failed(name: str, found: str, hint: str) -> Tick:
    """A cross."""
    return Tick(name=name, status="failed", found=found, hint=hint)


def skipped(names: Iterable[str], reason: str) -> list[Tick]:
    """What could not be looked at because something before it failed."""
    return [Tick(name=name, status="skipped", found=reason) for name in names]


def failed_by(name: str, error: SkyctlError, hint: str) -> Tick:
    """A cross for an error; its own hint goes before ``hint``."""
    return failed(name, error.message, error.hint or hint)
