"""``skyctl check``: preflight of every node and pair."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from skyctl.cli.common import (
    DEFAULT_TIMEOUT_S,
    AcceptNewHostKeysOption,
    ClusterOption,
    DryRunOption,
    LimitOption,
    TimeoutOption,
    command,
    connect_options,
    load_target,
)
from skyctl.cli.output import Output

if TYPE_CHECKING:
    from skyctl.check.report import CheckReport, NodeReport

LISTED_NODES = 8
"""Up to so many nodes every tick is listed; beyond, only what is not well (``-v``: all)."""

_MARKS = {"ok": "✓", "failed": "✗", "warning": "!", "skipped": "·"}
_PLAIN_MARKS = {"ok": "+", "failed": "x", "warning": "!", "skipped": "-"}
_STYLES = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "dim"}


@command
def check(
    out: Output,
    *,
    cluster: ClusterOption = None,
    limit: LimitOption = None,
    dry_run: DryRunOption = False,
    accept_new_host_keys: AcceptNewHostKeysOption = False,
    timeout: TimeoutOption = DEFAULT_TIMEOUT_S,
) -> int:
    """Try every node and every pair, and say what to do about each cross. Exit 4 if there is one."""
    target = load_target(cluster, limit)
    names = [node.name for node in target.cluster.nodes]
    if dry_run:
        out.line(f"would check {', '.join(names)}, and every pair of them")
        out.json({"cluster": target.cluster.name, "nodes": names})
        return 0
    from skyctl.check.preflight import check_nodes

    options = connect_options(target.path, accept_new_host_keys=accept_new_host_keys, timeout_s=timeout)
    with out.progress("check") as say:
        report = check_nodes(target.cluster, options, say)
    _show(out, report)
    out.json(report)
    return 0 if report.ok else 4


def _show(out: Output, report: CheckReport) -> None:
    full = out.verbose or (len(report.nodes) <= LISTED_NODES and not out.quiet)
    for node in report.nodes:
        _show_node(out, node, full)
    broken = [pair for pair in report.pairs if pair.error is not None]
    if report.pairs and not broken and not out.quiet:
        slowest = max(report.pairs, key=lambda pair: pair.connect_s or 0.0)
        slow = f"; slowest {slowest.source} to {slowest.target}, {(slowest.connect_s or 0) * 1000:.1f} ms"
        _mark(out, "ok", f"peer to peer: all {len(report.pairs)} ways work{slow}", indent=0)
    elif broken:
        _mark(out, "failed", f"peer to peer: {len(broken)} of {len(report.pairs)} ways fail", indent=0)
    for pair in broken:
        _mark(out, "failed", str(pair.error), indent=2)
        out.line(f"      next: {pair.hint}")
    crosses, warnings = report.crosses, report.warnings
    words = f"{crosses} cross{'' if crosses == 1 else 'es'}"
    words += f", {warnings} warning{'' if warnings == 1 else 's'}" if warnings else ""
    if not report.ok:
        out.line(words)
    elif not out.quiet:
        count = f"{len(report.nodes)} node{'' if len(report.nodes) == 1 else 's'}"
        out.line(f"all well: {count}" + (f"; {words.partition(', ')[2]}" if warnings else ""))


def _show_node(out: Output, node: NodeReport, full: bool) -> None:
    # What could not be looked at because of a cross above it would only repeat the cross.
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
    stream = sys.stderr if out.as_json else sys.stdout
    try:
        "✓✗·".encode(stream.encoding or "utf-8")
        marks = _MARKS
    except (UnicodeEncodeError, LookupError):
        marks = _PLAIN_MARKS
    out.line(f"{' ' * indent}{marks[status]} {text}", style=_STYLES[status])
