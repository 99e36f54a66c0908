"""The comparison as a table: rich for terminals, aligned lines for pipes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from skyctl.compare.rows import Row
from skyctl.compare.verdict import best_of
from skyctl.compare.words import UNKNOWN, gap, number, percent, seconds, times


def table(compared: Sequence[Row]) -> Table:
    """For a terminal. What was not measured has no column; the best row is bold.

    The layers' column is the one that wraps: 80 columns hold all of it.
    """
    measured = any(row.measured for row in compared)
    # Two lines a heading, and the spread below the median: so that all of it fits into 80 columns.
    out = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", collapse_padding=True)
    out.add_column("strategy", no_wrap=True)
    out.add_column("layers per device", overflow="fold", ratio=1, min_width=14)
    for heading in _headings(measured):
        out.add_column(heading, justify="right", no_wrap=True)
    best = best_of(compared)
    for row in compared:
        name = escape(row.strategy)
        if row.status in ("infeasible", "undecided"):
            why = escape(f"{row.status}: {row.error}" if row.error else row.status)
            out.add_row(f"[dim]{name}[/]", f"[yellow]{why}[/]", *[UNKNOWN] * len(_headings(measured)))
            continue
        layers = escape(row.layers) + (f"\n[yellow]{escape(row.error)}[/]" if row.error else "")
        unused = f"\n[dim]unused: {escape(', '.join(row.unused))}[/]" if row.unused else ""
        cells = _cells(row, measured)
        out.add_row(name, layers + unused, *cells, style="bold" if row is best else None)
    return out


def plain(compared: Sequence[Row]) -> list[str]:
    """For a pipe: one line a strategy, columns two blanks apart, the layers (or why there are none) last."""
    measured = any(row.measured for row in compared)
    headings = (heading.replace("\n", " ") for heading in _headings(measured))
    lines = [("strategy", *headings, "layers per device")]
    for row in compared:
        cells = tuple(cell.replace("\n", " ") for cell in _cells(row, measured))
        lines.append((row.strategy, *cells, " ".join(_last(row).split())))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    return [
        "  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:]), line[-1]))
        for line in lines
    ]


def _headings(measured: bool) -> list[str]:
    planned = ["predicted\nstep", "over\neven", "above\nbound"]
    return [*planned, "measured\nstep", "over\neven", "predicted\noff by", "loss"] if measured else planned


def _cells(row: Row, measured: bool) -> list[str]:
    fits = row.status not in ("infeasible", "undecided")
    planned = [seconds(row.predicted_s) if fits else UNKNOWN, times(row.predicted_speedup), gap(row.gap)]
    if not measured:
        return planned
    took = seconds(row.measured.median if row.measured else None)
    if row.measured:
        took += f"\n{_spread(row.measured.p10, row.measured.p90)}"
    return [
        *planned,
        took,
        times(row.measured_speedup),
        percent(row.prediction_error),
        number(row.final_loss),
    ]


def _spread(low_s: float, high_s: float) -> str:
    """``1.58–1.71``, the unit said once where it is the same."""
    low, high = seconds(low_s), seconds(high_s)
    if low.split()[1] == high.split()[1]:
        return f"{low.split()[0]}–{high.split()[0]}"
    return f"{low}–{high}"


def _last(row: Row) -> str:
    if row.status in ("infeasible", "undecided"):
        return f"{row.status}: {row.error}" if row.error else row.status
    parts = [row.layers]
    if row.unused:
        parts.append(f"unused: {', '.join(row.unused)}")
    if row.error:
        parts.append(row.error)
    return "; ".join(parts)
