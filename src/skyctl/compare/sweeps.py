"""One thing changed at a time: the step for each number of microbatches, or for each number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from skyctl.compare.number_format import format_gap, format_percent, format_ratio, format_seconds
from skyctl.compare.outcome import ComparisonRow, StrategyOutcome, summarize_outcomes
from skyctl.records.base import Count, Name, Record, Seconds, Seq

LEAST_NODE_GAIN = 0.01
"""A node that makes a step less than this part faster is said not to pay."""


class SweepCell(Record):
    """A strategy at one point. ``predicted_s`` None: there is no plan, ``status`` and ``error`` say why.

    ``measured_s``: the median step, where it was run.
    """

    strategy: Name
    status: str
    predicted_s: Seconds | None = None
    gap: float | None = None
    measured_s: Seconds | None = None
    unused: Seq[str] = ()
    error: str | None = None


class SweepPoint(Record):
    """``value``: the number of microbatches, or of nodes; ``added``: the node that this point adds."""

    value: Count
    added: str | None = None
    nodes: Seq[str] = ()
    cells: Seq[SweepCell]


class ComparisonSweep(Record):
    """``chosen``: the value that the comparison itself was made with, where it is one of them."""

    kind: Literal["microbatches", "nodes"]
    points: Seq[SweepPoint]
    chosen: Count | None = None

    @property
    def strategies(self) -> list[str]:
        """Their names, in the order of the first point."""
        return [cell.strategy for cell in self.points[0].cells] if self.points else []

    def line(self, strategy: str, measured: bool = False) -> list[tuple[int, float]]:
        """(which point, a step's seconds) of a strategy, at the points where it has any."""
        found = []
        for i, point in enumerate(self.points):
            for cell in point.cells:
                step_s = cell.measured_s if measured else cell.predicted_s
                if cell.strategy == strategy and step_s is not None:
                    found.append((i, step_s))
        return found


def sweep_point(
    value: int, outcomes: Sequence[StrategyOutcome], *, nodes: Sequence[str] = (), added: str | None = None
) -> SweepPoint:
    """The point of a sweep that has these outcomes."""
    cells = tuple(
        SweepCell(
            strategy=row.strategy,
            status=row.status,
            predicted_s=row.predicted_s,
            gap=row.gap,
            unused=row.unused,
            error=row.error,
        )
        for row in summarize_outcomes(outcomes)
    )
    return SweepPoint(value=value, added=added, nodes=tuple(nodes), cells=cells)


def add_measured_steps(sweep: ComparisonSweep, compared: Sequence[ComparisonRow]) -> ComparisonSweep:
    """The same with what the comparison measured, at the value that it was made with."""
    took_s = {row.strategy: row.measured.median for row in compared if row.measured}

    def measured(point: SweepPoint) -> SweepPoint:
        cells = (c.model_copy(update={"measured_s": took_s.get(c.strategy)}) for c in point.cells)
        return point.model_copy(update={"cells": tuple(cells)})

    points = (measured(point) if point.value == sweep.chosen else point for point in sweep.points)
    return sweep.model_copy(update={"points": tuple(points)})


def sweep_table(sweep: ComparisonSweep) -> tuple[list[str], list[list[str]]]:
    """(headings, rows of text): a row a value, a column a strategy; the last strategy's gain at the end."""
    best = sweep.strategies[-1] if sweep.strategies else ""
    line = sweep.line(best)
    first = sweep.points[line[0][0]].value if line else 1
    unit = "" if sweep.kind == "microbatches" else " node" if first == 1 else " nodes"
    headings = [sweep.kind, *(["added"] if sweep.kind == "nodes" else []), *sweep.strategies]
    headings += ["above bound", f"{best} over {first}{unit}"]
    rows = []
    for at, point in enumerate(sweep.points):
        row = [f"{point.value} *" if point.value == sweep.chosen else str(point.value)]
        row += [point.added or ""] if sweep.kind == "nodes" else []
        row += [_cell_text(cell) for cell in point.cells]
        rows.append([*row, format_gap(point.cells[-1].gap), format_ratio(speedup_at(sweep, at))])
    return headings, rows


def _cell_text(cell: SweepCell) -> str:
    if cell.predicted_s is None:
        return "does not fit" if cell.status == "infeasible" else cell.status
    measured = f" (measured {format_seconds(cell.measured_s)})" if cell.measured_s is not None else ""
    return format_seconds(cell.predicted_s) + measured


def speedup_at(sweep: ComparisonSweep, at: int) -> float | None:
    """How many times faster the last strategy is there than at the first point where it has a plan."""
    line = dict(sweep.line(sweep.strategies[-1])) if sweep.strategies else {}
    first = next(iter(line.values()), None)
    return first / line[at] if first and line.get(at) else None


def describe_sweep(sweep: ComparisonSweep) -> list[str]:
    """Which value is best, or of each node whether it pays: a sentence each."""
    if not sweep.points or not sweep.strategies:
        return []
    best = sweep.strategies[-1]
    line = dict(sweep.line(best))
    if not line:
        return [f"{best} has no plan that fits at any of these"]
    if sweep.kind == "microbatches":
        fastest = min(line, key=lambda i: line[i])
        value, step = sweep.points[fastest].value, format_seconds(line[fastest])
        return [f"{best} is fastest with {value} microbatches: {step} a step, predicted"]
    return [_describe_node(sweep, best, line, at) for at in range(1, len(sweep.points)) if at in line]


def _describe_node(sweep: ComparisonSweep, best: str, line: dict[int, float], at: int) -> str:
    """What the node that a point adds does to the step. ``line``: by point, the best strategy's seconds."""
    point = sweep.points[at]
    node, step = point.added or f"node {point.value}", f"{format_seconds(line[at])} a step"
    if at - 1 not in line:
        return f"with {node} ({point.value} nodes) there is a plan that fits: {step}"
    faster = line[at - 1] / line[at] if line[at] else 1.0
    if faster >= 1 + LEAST_NODE_GAIN:
        return f"adding {node} pays: {format_ratio(faster)} faster, {step}"
    if any(cell.strategy == best and node in cell.unused for cell in point.cells):
        return f"adding {node} does not pay: the best plan leaves it unused"
    return f"adding {node} does not pay: a step takes {format_percent(1 / faster - 1)}"
