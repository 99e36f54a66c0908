"""``skyctl clean``: remove from nodes what skyctl keeps there and nothing uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output, format_count
from skyctl.cli.command_runner import command
from skyctl.cli.option_values import complete_nodes
from skyctl.cli.options import ClusterOption, ClusterOptions, ConnectionOptions, DryRunOption

if TYPE_CHECKING:
    from skyctl.jobs.cleaning_report import CleaningReport, NodeCleaning
    from skyctl.remote.agent_messages import CleanedKind
    from skyctl.setup.fleet import NodeOutcome

_NAMES = {
    "packages": "skyctl's code",
    "trees": "workload",
    "blobs": "file",
    "runs": "run's checkpoints",
    "sessions": "session",
    "trials": "dtype trials",
    "turns": "shared device",
    "environments": "environment",
}


@command
def clean(
    out: Output,
    nodes: Annotated[
        str | None,
        typer.Argument(
            metavar="NODES",
            help="Only these nodes: names, globs, groups, !left-out; default: all, and this machine.",
            autocompletion=complete_nodes,
            show_default=False,
        ),
    ] = None,
    *,
    cluster: ClusterOption = None,
    environments: Annotated[
        bool, typer.Option("--environments", help="Also what `skyctl setup` has made for this cluster.")
    ] = False,
    dry_run: DryRunOption = False,
    connection: ConnectionOptions,
) -> int | None:
    """Remove from nodes what skyctl keeps there: code, workloads, files. It is sent again when it is needed.

    Files that a session or run uses stay, as do checkpoints (`skyctl checkpoint rm`). Exit 4 if a node
    could not be cleaned: the others are.
    """
    from skyctl.inventory.cluster_file import DEFAULT_PATH
    from skyctl.jobs.cleaning_report import clean_caches

    target = None
    if cluster is not None or nodes is not None or Path(DEFAULT_PATH).exists():
        target = ClusterOptions(cluster=cluster, limit=nodes).load(set_up=False)
    else:
        out.note(f"there is no {DEFAULT_PATH}: this machine only")
    connect = connection.connect_options(target.path if target is not None else None)
    removed: dict[str, NodeOutcome] = {}
    with out.progress("clean") as progress:
        if environments and target is not None:
            from skyctl.jobs.cluster_setup import remove_all_environments

            removed = remove_all_environments(
                target.cluster, connect, dry_run=dry_run, progress=progress, on_node=progress.node
            )
        report = clean_caches(
            target.cluster if target is not None else None,
            connect,
            dry_run=dry_run,
            this_machine=nodes is None,
            environments=removed,
            on_node=progress.node,
        )
    _show(out, report)
    out.json(report)
    return None if report.ok else 4


def _show(out: Output, report: CleaningReport) -> None:
    rows = [row for node in report.nodes for row in _rows(node)]
    if not out.quiet and rows:
        out.table(("node", "what", "would be freed" if report.dry_run else "freed", "stays"), rows)
    for node in report.nodes:
        if node.error is not None:
            out.warn(node.error + (f"\n  next: {node.hint}" if node.hint else ""))
    verb = "would free" if report.dry_run else "freed"
    count = format_count(sum(1 + len(n.shared_by) for n in report.nodes if n.error is None), "node")
    out.line(f"{verb} {_size(report.freed_bytes)} on {count}")
    if any(kind.what == "runs" for node in report.nodes for kind in node.cleaned):
        out.note("checkpoints go by `skyctl checkpoint rm RUN`")


def _rows(node: NodeCleaning) -> list[tuple[str, str, str, str]]:
    name = ", ".join((node.node, *node.shared_by))
    if node.error is not None and not node.cleaned:
        return [(name, "see below", "", "")]
    rows = [(name, _NAMES[kind.what], *_columns(kind)) for kind in node.cleaned]
    return rows or [(name, "nothing", "", "")]


def _columns(kind: CleanedKind) -> tuple[str, str]:
    why = "" if kind.what == "runs" else " in use"
    freed = f"{kind.removed}: {_size(kind.freed_bytes)}" if kind.removed else ""
    return freed, f"{kind.kept}{why}: {_size(kind.kept_bytes)}" if kind.kept else ""


def _size(count_bytes: float) -> str:
    """As ``1.5 GiB``, ``20.0 MiB`` or ``12 KiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count_bytes >= unit:
            return f"{count_bytes / unit:.1f} {name}"
    return f"{count_bytes / 1024:.0f} KiB"
