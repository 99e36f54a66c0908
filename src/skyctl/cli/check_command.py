"""``skyctl check``: preflight of every node and pair."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from skyctl.cli.command_output import Output, format_count
from skyctl.cli.command_runner import command
from skyctl.cli.options import (
    ClusterOptions,
    ClusterTarget,
    ConnectionOptions,
    DefaultedWorkloadOptions,
    DryRunOption,
    WorkloadArgument,
)

if TYPE_CHECKING:
    from skyctl.check.check_report import CheckReport, NodeReport
    from skyctl.remote.base import ConnectOptions

LISTED_NODES = 8
"""In clusters of at most so many nodes every check is listed; in larger ones only problems (``-v``: all)."""

_MARKS = {"ok": "✓", "failed": "✗", "warning": "!", "skipped": "·"}
_PLAIN_MARKS = {"ok": "+", "failed": "x", "warning": "!", "skipped": "-"}
_STYLES = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "dim"}


@command
def check(
    out: Output,
    workload: WorkloadArgument = None,
    *,
    nodes: ClusterOptions,
    training: DefaultedWorkloadOptions,
    dry_run: DryRunOption = False,
    connection: ConnectionOptions,
) -> int:
    """Try every node and every pair, and say what to do about each problem. Exit 4 if there is one.

    With a WORKLOAD, one node also trains it for two steps, as plain torch does and cut into layers, and
    compares losses, gradients and weights. Exit 2 if they differ.
    """
    target = nodes.load()
    names = [node.name for node in target.cluster.nodes]
    if workload is not None:
        training.parse_request(workload, microbatches=None)  # a mistyped one needs no node to be told
    if dry_run:
        out.line(f"would check {', '.join(names)}, and every pair of them")
        out.json({"cluster": target.cluster.name, "nodes": names})
        return 0
    from skyctl.check.preflight import check_nodes

    connect = connection.connect_options(target.path)
    with out.progress("check") as say:
        report = check_nodes(target.cluster, connect, say)
    _show(out, report)
    compared = None
    if workload is not None and report.ok:
        compared = _compare(out, workload, training, target, connect)
    out.json({**report.model_dump(mode="json"), "workload": compared} if workload is not None else report)
    return 0 if report.ok else 4


def _compare(
    out: Output,
    workload: str,
    training: DefaultedWorkloadOptions,
    target: ClusterTarget,
    connect: ConnectOptions,
) -> dict[str, Any]:
    """Compares the workload's layers with the model itself, and says what came of it."""
    from skyctl.control.node_sessions import connect_nodes
    from skyctl.control.profiles import compare_workload

    request, loaded = training.make_request(workload, microbatches=None)
    out.notes(loaded.notes)
    with (
        out.progress("check") as progress,
        connect_nodes(target.cluster.nodes, connect, progress, target.everyone) as sessions,
    ):
        found = compare_workload(target.cluster, sessions, request, loaded, progress)
    place = f" (on {found.device}, {found.seconds:.1f} s)" if found.device else ""
    if found.doubt is None:
        layers = format_count(loaded.layers, "layer")
        _mark(out, "ok", f"{request.spec.source}: as in plain torch, cut into {layers}{place}", indent=0)
    else:
        _mark(out, "warning", f"{request.spec.source}: {found.doubt}{place}", indent=0)
    return found.model_dump(mode="json")


def _show(out: Output, report: CheckReport) -> None:
    """A list of checks per node, then the pairs, then how many problems there are."""
    full = out.verbose or (len(report.nodes) <= LISTED_NODES and not out.quiet)
    for node in report.nodes:
        _show_node(out, node, full)
    broken = [pair for pair in report.pairs if pair.error is not None]
    if report.pairs and not broken and not out.quiet:
        slowest = max(report.pairs, key=lambda pair: pair.connect_s or 0.0)
        slow = f"; slowest {slowest.source} to {slowest.target}, {(slowest.connect_s or 0) * 1000:.1f} ms"
        _mark(out, "ok", f"peer to peer: all {len(report.pairs)} connections work{slow}", indent=0)
    elif broken:
        _mark(out, "failed", f"peer to peer: {len(broken)} of {len(report.pairs)} connections fail", indent=0)
    for pair in broken:
        _mark(out, "failed", str(pair.error), indent=2)
        out.line(f"      next: {pair.hint}")
    warnings = format_count(report.warnings, "warning") if report.warnings else ""
    if not report.ok:
        out.line(format_count(report.problems, "problem") + (f", {warnings}" if warnings else ""))
    elif not out.quiet:
        out.line(
            f"all well: {format_count(len(report.nodes), 'node')}" + (f"; {warnings}" if warnings else "")
        )


def _show_node(out: Output, node: NodeReport, full: bool) -> None:
    """A node's checks: all, or only problems and warnings."""
    # What could not be checked because of a problem above it would only repeat the problem.
    wanted = ("failed", "warning", "ok") if full else ("failed", "warning")
    shown = [tick for tick in node.ticks if out.verbose or tick.status in wanted]
    if not shown and out.quiet:
        return
    worst = "failed" if not node.ok else "ok"
    via = f"  {node.address}" if node.address else ""
    _mark(out, worst, f"{node.node}{via}", indent=0)
    for tick in shown:
        _mark(out, tick.status, f"{tick.name:<9} {tick.found or ''}".rstrip(), indent=2)
        if tick.hint:
            out.line(f"      next: {tick.hint}")


def _mark(out: Output, status: str, text: str, *, indent: int) -> None:
    """A line with the status's mark, a plain one where the terminal can't show it."""
    stream = sys.stderr if out.as_json else sys.stdout
    try:
        "✓✗·".encode(stream.encoding or "utf-8")
        marks = _MARKS
    except (UnicodeEncodeError, LookupError):
        marks = _PLAIN_MARKS
    out.line(f"{' ' * indent}{marks[status]} {text}", style=_STYLES[status])
