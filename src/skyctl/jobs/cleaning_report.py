"""Cleaning up: what skyctl keeps on nodes and nothing uses is removed, with one outcome a node."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from skyctl.agent.node_cache import default_cache_root
from skyctl.errors import SkyctlError
from skyctl.records.base import Bytes, Name, Record, Seq
from skyctl.records.cluster import Cluster, Node
from skyctl.remote.agent_messages import CleanedKind
from skyctl.remote.base import ConnectOptions
from skyctl.remote.bootstrap import clean_node_cache
from skyctl.remote.session_factory import connect_node
from skyctl.remote.task_group import TaskGroup
from skyctl.setup.fleet import NodeOutcome

CLEAN_TIMEOUT_S = 600.0
MAX_CONNECTIONS = 8
THIS_MACHINE = "this machine"


class NodeCleaning(Record):
    """The things that went and stayed on one node. ``shared_by``: further local nodes with the same cache."""

    node: Name
    shared_by: Seq[Name] = ()
    cleaned: Seq[CleanedKind] = ()
    error: str | None = None
    hint: str | None = None


class CleaningReport(Record):
    """All nodes, in inventory order. ``freed_bytes``: with ``dry_run``, what would be freed."""

    cluster: Name | None
    dry_run: bool
    ok: bool
    freed_bytes: Bytes
    nodes: Seq[NodeCleaning]


def clean_caches(
    cluster: Cluster | None,
    options: ConnectOptions,
    *,
    dry_run: bool,
    this_machine: bool,
    environments: Mapping[str, NodeOutcome],
    on_node: Callable[[str, str, float], None],
) -> CleaningReport:
    """Removes from each node's cache what no process there uses.

    Args:
        cluster: whose nodes; None: this machine alone.
        this_machine: this machine's own cache too, where it has one.
        environments: what became of each node's environments before, where those were to go.
        on_node: told a node's name, what it is at, and the share done (1: it has ended, < 0: failed).
    """
    caches = _group_by_cache(cluster.nodes if cluster is not None else (), this_machine=this_machine)
    options = replace(options, start_timeout_s=CLEAN_TIMEOUT_S)
    group: TaskGroup[str] = TaskGroup("clean")
    slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
    for node, _ in caches:
        on_node(node.name, "cleaning", 0.5)
        group.run(node.name, partial(_clean, node, options, slots, dry_run=dry_run))
    outcomes: dict[str, Sequence[CleanedKind] | SkyctlError] = {}
    for _ in caches:
        name, outcome = group.wait_outcome()
        outcomes[name] = outcome
        failed = isinstance(outcome, SkyctlError)
        on_node(name, outcome.message if failed else "cleaned", -1 if failed else 1)
    nodes = tuple(_outcome(node, others, outcomes[node.name], environments) for node, others in caches)
    return CleaningReport(
        cluster=cluster.name if cluster is not None else None,
        dry_run=dry_run,
        ok=all(node.error is None for node in nodes),
        freed_bytes=float(sum(kind.freed_bytes for node in nodes for kind in node.cleaned)),
        nodes=nodes,
    )


def _clean(
    node: Node, options: ConnectOptions, slots: threading.BoundedSemaphore, *, dry_run: bool
) -> Sequence[CleanedKind]:
    with slots:
        connection = connect_node(node, options)
        try:
            return clean_node_cache(connection, options, dry_run=dry_run)
        finally:
            connection.close()


def _group_by_cache(nodes: Sequence[Node], *, this_machine: bool) -> list[tuple[Node, list[str]]]:
    """A node for each cache, and the others that share it: local nodes do, unless their ``env`` says else."""
    if this_machine and default_cache_root().exists():
        nodes = [*nodes, Node(name=THIS_MACHINE, transport="local")]
    local: dict[tuple[str | None, ...], list[str]] = {}
    groups = []
    for node in nodes:
        place = tuple(node.env.get(key, os.environ.get(key)) for key in ("XDG_CACHE_HOME", "HOME"))
        if node.transport == "local" and place in local:
            local[place] += [node.name] if node.name != THIS_MACHINE else []
            continue
        others: list[str] = []
        if node.transport == "local":
            local[place] = others
        groups.append((node, others))
    return groups


def _outcome(
    node: Node,
    shared_by: Sequence[str],
    cleaned: Sequence[CleanedKind] | SkyctlError,
    environments: Mapping[str, NodeOutcome],
) -> NodeCleaning:
    removals = [environments[name] for name in (node.name, *shared_by) if name in environments]
    failure = next((removal for removal in removals if removal.status == "failed"), None)
    error, hint = (failure.error, failure.hint) if failure is not None else (None, None)
    if isinstance(cleaned, SkyctlError):
        error, hint, cleaned = cleaned.message, cleaned.hint, ()
    gone = [removal for removal in removals if removal.status in ("removed", "lacking")]
    if gone:
        size = int(sum(removal.size_bytes or 0 for removal in gone))
        kind = CleanedKind(what="environments", removed=len(gone), freed_bytes=size, kept=0, kept_bytes=0)
        cleaned = (*cleaned, kind)
    return NodeCleaning(
        node=node.name, shared_by=tuple(shared_by), cleaned=tuple(cleaned), error=error, hint=hint
    )
