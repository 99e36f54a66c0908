"""One thing changed at a time: the step for each number of microbatches, or for each number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from skyctl.compare.rows import Outcome, Row, rows
from skyctl.compare.words import gap, percent, seconds, times
from skyctl.records.base import Count, Name, Record, Seconds, Seq

PAYS = 0.01
"""A machine that makes a step less than this part faster is said to change nothing."""


class SweepCell(Record):
    """One strategy at one point. ``predicted_s`` None: there is no plan, ``status`` and ``error`` say why.

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


class Sweep(Record):
    """``chosen``: the value that the comparison itself was made with, where it is one of them."""

    kind: Literal["microbatches", "nodes"]
    points: Seq[SweepPoint]
    chosen: Count | None = None

    @property
    def strategies(self) -> list[str]:
        """In the order of the first point."""
        return [cell.strategy for cell in self.points[0].cells] if self.points else []

    def line(self, strategy: str, measured: bool = False) -> list[tuple[int, float]]:
        """(which point, seconds) where there are any."""
        found = []
        for i, point in enumerate(self.points):
            for cell in point.cells:
                step_s = cell.measured_s if measured else cell.predicted_s
                if cell.strategy == strategy and step_s is not None:
                    found.append((i, step_s))
        return found


def point(
    value: int, outcomes: Sequence[Outcome], *, nodes: Sequence[str] = (), added: str | None = None
) -> SweepPoint:
    """What came of one value."""
    return SweepPoint(value=value, added=added, nodes=tuple(nodes), cells=tuple(map(_cell, rows(outcomes))))


def with_measured(sweep: Sweep, compared: Sequence[Row]) -> Sweep:
    """The same with what the comparison measured, at the value that it was made with."""
    took = {row.strategy: row.measured.median for row in compared if row.measured}
    points = tuple(
        one
        if one.value != sweep.chosen
        else one.model_copy(
            update={
                "cells": tuple(
                    cell.model_copy(update={"measured_s": took.get(cell.strategy)}) for cell in one.cells
                )
            }
        )
        for one in sweep.points
    )
    return sweep.model_copy(update={"points": points})


def table_of(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """(headings, rows of text): a row a value, two columns a strategy; the best one's gain last."""
    best = sweep.strategies[-1] if sweep.strategies else ""
    heads = ["microbatches" if sweep.kind == "microbatches" else "nodes"]
    heads += ["added"] if sweep.kind == "nodes" else []
    heads += [*sweep.strategies, "above bound", f"{best} over {_first_words(sweep)}"]
    out = []
    for at, one in enumerate(sweep.points):
        line = [str(one.value) + (" *" if one.value == sweep.chosen else "")]
        line += [one.added or ""] if sweep.kind == "nodes" else []
        line += [_words(cell) for cell in one.cells]
        last = one.cells[-1]
        line += [gap(last.gap), times(gain(sweep, at))]
        out.append(line)
    return heads, out


def gain(sweep: Sweep, at: int) -> float | None:
    """How many times faster the last strategy is there than at the first point where it has a plan."""
    line = dict(sweep.line(sweep.strategies[-1])) if sweep.strategies else {}
    first = next(iter(line.values()), None)
    return first / line[at] if first and line.get(at) else None


def sentences(sweep: Sweep) -> list[str]:
    """What it says, in words."""
    if not sweep.points or not sweep.strategies:
        return []
    best = sweep.strategies[-1]
    line = dict(sweep.line(best))
    if not line:
        return [f"{best} has no plan that fits at any of these"]
    fastest = min(line, key=lambda i: line[i])
    if sweep.kind == "microbatches":
        return [
            f"{best} is fastest with {sweep.points[fastest].value} microbatches: "
            f"{seconds(line[fastest])} a step, predicted"
        ]
    return _nodes_said(sweep, best, line)


def _nodes_said(sweep: Sweep, best: str, line: dict[int, float]) -> list[str]:
    said = []
    for at, before in zip(range(1, len(sweep.points)), range(len(sweep.points) - 1), strict=True):
        one = sweep.points[at]
        who = one.added or f"node {one.value}"
        if at not in line:
            continue
        if before not in line:
            said.append(
                f"with {who} ({one.value} nodes) there is a plan that fits: {seconds(line[at])} a step"
            )
            continue
        faster = line[before] / line[at] if line[at] else 1.0
        if faster >= 1 + PAYS:
            said.append(f"adding {who} pays: {times(faster)} faster, {seconds(line[at])} a step")
        else:
            left = next((c for c in one.cells if c.strategy == best and who in c.unused), None)
            why = "the best plan leaves it unused" if left else f"a step takes {percent(1 / faster - 1)}"
            said.append(f"adding {who} does not pay: {why}")
    return said


def _first_words(sweep: Sweep) -> str:
    line = sweep.line(sweep.strategies[-1]) if sweep.strategies else []
    first = sweep.points[line[0][0]].value if line else 1
    if sweep.kind == "microbatches":
        return str(first)
    return f"{first} node{'' if first == 1 else 's'}"


def _words(cell: SweepCell) -> str:
    if cell.predicted_s is None:
        return "does not fit" if cell.status == "infeasible" else cell.status
    return seconds(cell.predicted_s) + (
        f" (measured {seconds(cell.measured_s)})" if cell.measured_s is not None else ""
    )


def _cell(row: Row) -> SweepCell:
    return SweepCell(
        strategy=row.strategy,
        status=row.status,
        predicted_s=row.predicted_s,
        gap=row.gap,
        unused=row.unused,
        error=row.error,
    )
