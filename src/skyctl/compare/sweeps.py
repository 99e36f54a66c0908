"""One thing changed at a time: the step for each number of microbatches, or for each number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skyctl.compare.conclusion import Gain, compare_plans
from skyctl.compare.number_format import (
    format_gap,
    format_percent,
    format_ratio,
    format_seconds,
)
from skyctl.compare.outcome import ComparisonRow, StrategyOutcome, summarize_outcomes
from skyctl.records.base import Count, Name, Record, Seconds, Seq
from skyctl.records.interval import Interval

LEAST_NODE_GAIN = 0.01
"""A node that makes a step less than this part faster is said not to pay."""


class SweepCell(Record):
    """A strategy at one point. ``predicted_s`` None: there is no plan, ``status`` and ``error`` say why.

    ``measured_s``: the median step, where it was run. ``predicted_interval``: of ``predicted_s``.
    """

    strategy: Name
    status: str
    predicted_s: Seconds | None = None
    gap: float | None = None
    measured_s: Seconds | None = None
    unused: Seq[str] = ()
    error: str | None = None
    predicted_interval: Interval | None


class SweepPoint(Record):
    """``value``: the number of microbatches, or of nodes; ``added``: the node that this point adds.

    ``gain``: how many times as fast the last strategy is here as at the point before; None: it has no plan at
    one of them.
    """

    value: Count
    added: str | None = None
    nodes: Seq[str] = ()
    cells: Seq[SweepCell]
    gain: Gain | None


@dataclass(frozen=True)
class NodesPoint:
    """The outcome of each strategy with the first ``nodes`` by speed."""

    nodes: tuple[str, ...]
    outcomes: Sequence[StrategyOutcome]


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
        points = []
        for i, point in enumerate(self.points):
            for cell in point.cells:
                step_s = cell.measured_s if measured else cell.predicted_s
                if cell.strategy == strategy and step_s is not None:
                    points.append((i, step_s))
        return points


def nodes_sweep(points: Sequence[NodesPoint], chosen: int) -> ComparisonSweep:
    """The sweep of these points, with the rows that all of them have.

    ``chosen``: how many nodes the comparison itself has.
    """
    names = [{outcome.strategy for outcome in point.outcomes} for point in points]
    everywhere = set.intersection(*names) if names else set()
    before: Sequence[StrategyOutcome] = ()
    swept = []
    for point in points:
        outcomes = [outcome for outcome in point.outcomes if outcome.strategy in everywhere]
        added = point.nodes[-1] if len(point.nodes) > 1 else None
        swept.append(sweep_point(len(point.nodes), outcomes, nodes=point.nodes, added=added, before=before))
        before = outcomes
    has_chosen = any(point.value == chosen for point in swept)
    return ComparisonSweep(kind="nodes", points=tuple(swept), chosen=chosen if has_chosen else None)


def sweep_point(
    value: int,
    outcomes: Sequence[StrategyOutcome],
    *,
    nodes: Sequence[str] = (),
    added: str | None = None,
    before: Sequence[StrategyOutcome] = (),
) -> SweepPoint:
    """The point of a sweep that has these outcomes; ``before``: those of the point before it."""
    cells = tuple(
        SweepCell(
            strategy=row.strategy,
            status=row.status,
            predicted_s=row.predicted_s,
            gap=row.gap,
            measured_s=row.measured_s,
            unused=row.unused,
            error=row.error,
            predicted_interval=row.predicted_interval,
        )
        for row in summarize_outcomes(outcomes)
    )
    gain = compare_plans(outcomes[-1], before[-1]) if outcomes and before else None
    return SweepPoint(value=value, added=added, nodes=tuple(nodes), cells=cells, gain=gain)


def add_measured_steps(sweep: ComparisonSweep, compared: Sequence[ComparisonRow]) -> ComparisonSweep:
    """The same with what the comparison measured, each row at the value that it was made with."""
    took_s = {
        (
            row.strategy,
            row.microbatches if sweep.kind == "microbatches" else sweep.chosen,
        ): row.measured_s
        for row in compared
        if row.measured
    }

    def measured(point: SweepPoint) -> SweepPoint:
        cells = (
            cell.model_copy(update={"measured_s": took_s.get((cell.strategy, point.value), cell.measured_s)})
            for cell in point.cells
        )
        return point.model_copy(update={"cells": tuple(cells)})

    return sweep.model_copy(update={"points": tuple(map(measured, sweep.points))})


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
    """How many times as fast the last strategy is there as at the first point where it has a plan.

    By what was measured, where all of its plans were run.
    """
    line = _shown_line(sweep, sweep.strategies[-1]) if sweep.strategies else {}
    first = next(iter(line.values()), None)
    return first / line[at] if first and line.get(at) else None


def _shown_line(sweep: ComparisonSweep, strategy: str) -> dict[int, float]:
    """By point, a strategy's step in seconds: measured where all of them were, else predicted."""
    predicted, measured = dict(sweep.line(strategy)), dict(sweep.line(strategy, measured=True))
    return measured if measured.keys() == predicted.keys() else predicted


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
    """How the node that a point adds changes the step. ``line``: by point, the best strategy's seconds."""
    point = sweep.points[at]
    node, gain = point.added or f"node {point.value}", point.gain
    if at - 1 not in line or gain is None:
        return (
            f"with {node} ({point.value} nodes) there is a plan that fits: {format_seconds(line[at])} a step"
        )
    if any(cell.strategy == best and node in cell.unused for cell in point.cells):
        return f"adding {node} does not pay: the best plan leaves it unused"
    how = "predicted" if gain.measured is None else "measured"
    step_s = line[at] if gain.measured is None else dict(sweep.line(best, measured=True))[at]
    took = f"{format_seconds(step_s)} a step, {how}"
    if not gain.told and gain.low is not None:
        return f"adding {node} makes no difference that can be told: {took}"
    if gain.ratio >= 1 + LEAST_NODE_GAIN:
        return f"adding {node} pays: {format_ratio(gain.ratio)} as fast, {took}"
    return f"adding {node} does not pay: a step takes {format_percent(1 / gain.ratio - 1)}, {how}"
