"""The findings of a check, per node and per pair: printed as a tick list or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from skyctl.errors import SkyctlError
from skyctl.records.base import Name, Record, Seconds, Seq

TickStatus = Literal["ok", "warning", "failed", "skipped"]


class Tick(Record):
    """The outcome of one check. ``found``: what is there; ``hint``: what to do about a problem or warning."""

    name: Name
    status: TickStatus
    found: str | None = None
    hint: str | None = None


class DtypeReport(Record):
    """The outcome of a trial of one dtype on a node's processor (``device/dtype_support.py``).

    ``max_cpu_isa``: what ``ONEDNN_MAX_CPU_ISA`` has to be for it, None: nothing. ``died_by``: the signal that
    ended the trial without it.
    """

    dtype: Name
    works: bool
    max_cpu_isa: str | None
    died_by: str | None


class NodeReport(Record):
    """The outcomes of one node's checks.

    ``address``: what its peers reach it by; ``interface``: whose address that is.
    ``dtypes``: those that were tried; float32 is not.
    """

    node: Name
    address: str | None
    interface: str | None
    ticks: Seq[Tick]
    dtypes: Seq[DtypeReport] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing failed on the node."""
        return all(tick.status != "failed" for tick in self.ticks)


class PairReport(Record):
    """Whether one node can connect to another. ``error`` is None where it can."""

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
    def problems(self) -> int:
        """How many checks failed, of nodes and of pairs."""
        ticks = sum(tick.status == "failed" for node in self.nodes for tick in node.ticks)
        return ticks + sum(pair.error is not None for pair in self.pairs)

    @property
    def warnings(self) -> int:
        """How many checks ended with a warning."""
        return sum(tick.status == "warning" for node in self.nodes for tick in node.ticks)


def ok(name: str, found: str | None = None) -> Tick:
    """The outcome of a check that holds."""
    return Tick(name=name, status="ok", found=found)


def warning(name: str, found: str, hint: str) -> Tick:
    """The outcome of a check that holds, but is worth a look."""
    return Tick(name=name, status="warning", found=found, hint=hint)


def failed(name: str, found: str, hint: str) -> Tick:
    """The outcome of a check that failed."""
    return Tick(name=name, status="failed", found=found, hint=hint)


def skipped(names: Iterable[str], reason: str) -> list[Tick]:
    """The outcomes of checks that could not be made because one before them failed."""
    return [Tick(name=name, status="skipped", found=reason) for name in names]


def failed_with(name: str, error: SkyctlError, hint: str) -> Tick:
    """The outcome of a check that failed with an error, whose own hint goes before ``hint``."""
    return failed(name, error.message, error.hint or hint)
