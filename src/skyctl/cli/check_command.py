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
    from collections.abc import Sequence

    from skyctl.check.check_report import CheckReport, NodeReport, Tick
    from skyctl.remote.base import ConnectOptions

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
    from skyctl.jobs.node_sessions import connect_nodes
    from skyctl.jobs.profiles import compare_workload

    request, loaded = training.make_request(workload, microbatches=None)
    out.notes(loaded.notes)
    with (
        out.progress("check") as progress,
        connect_nodes(target.cluster.nodes, connect, progress, target.everyone) as sessions,
    ):
        compared = compare_workload(target.cluster, sessions, request, loaded, progress)
    place = f" (on {compared.device}, {compared.seconds:.1f} s)" if compared.device else ""
    if compared.doubt is None:
        layers = format_count(loaded.layers, "layer")
        _mark(out, "ok", f"{request.spec.source}: as in plain torch, cut into {layers}{place}", indent=0)
    else:
        _mark(out, "warning", f"{request.spec.source}: {compared.doubt}{place}", indent=0)
    return compared.model_dump(mode="json")


def _show(out: Output, report: CheckReport) -> None:
    """Which nodes are well, what is wrong with the others, the pairs, and how many problems there are."""
    well = [node for node in report.nodes if not _shown_ticks(node, full=out.verbose)]
    if well and not out.quiet:
        _mark(
            out, "ok", f"{format_count(len(well), 'node')}: {', '.join(node.node for node in well)}", indent=0
        )
        names = dict.fromkeys(tick.name for node in well for tick in node.ticks if tick.status == "ok")
        _mark(out, "ok", f"each: {', '.join(names)}", indent=2)
    for node in report.nodes:
        _show_node(out, node, _shown_ticks(node, full=out.verbose))
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
        text = f"all well: {format_count(len(report.nodes), 'node')}" + (f"; {warnings}" if warnings else "")
        out.line(text if out.verbose else f"{text} (-v lists every check)")


def _shown_ticks(node: NodeReport, *, full: bool) -> list[Tick]:
    """A node's checks: all, or only problems and warnings.

    Those that a problem has left out would only repeat it.
    """
    return [tick for tick in node.ticks if full or tick.status in ("failed", "warning")]


def _show_node(out: Output, node: NodeReport, ticks: Sequence[Tick]) -> None:
    """A node and these of its checks; nothing without any."""
    if not ticks:
        return
    via = f"  {node.address}" if node.address else ""
    _mark(out, "ok" if node.ok else "failed", f"{node.node}{via}", indent=0)
    for tick in ticks:
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
