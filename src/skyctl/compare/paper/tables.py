"""The experiment as tables: the same cells for a terminal, a pipe and ``docs/paper.md``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from skyctl.compare.paper.closed import Factors, most_balanced_chain, most_pipeline, spread_for
from skyctl.compare.paper.records import PUBLISHED, Case, Execution, Paper
from skyctl.compare.words import UNKNOWN, gap, percent, seconds, times

TITLES: dict[Execution, str] = {
    "chain": "As published: one batch at a time through all stages, cut for the least slowest stage",
    "chain-sum": "The same execution, cut for what it takes: the sum of the stages",
    "steady": "Pipelined, steady state: a batch takes what the slowest stage takes",
    "step": "Pipelined, one step of the same 32 samples (1F1B, a sample a microbatch, fill and drain in it)",
}
CLOSED: dict[Execution, str] = {
    "chain": "perfect balance",
    "chain-sum": "all on the fastest",
    "steady": "perfect balance",
    "step": "no fill or drain",
}
UNTIMED = ("chain", "chain-sum", "steady", "step", "memory", "formulas", "executions")
"""Sections whose cells are the same every time, but for ``step``'s optimal."""


class Table(NamedTuple):
    """``name``: of its section in the document."""

    name: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(paper: Paper) -> list[Table]:
    """All there are, in the order of reading."""
    made = [_execution(paper, name, title) for name, title in TITLES.items()]
    made += [_memory(paper), _formulas(paper), _executions(paper), _planning(paper)]
    return [table for table in made if table.rows]


def verdict(paper: Paper) -> list[str]:
    """What the experiment says, in a few sentences; empty where the largest size was not run."""
    try:
        chain, summed, steady = (paper.case(64, 160, name) for name in ("chain", "chain-sum", "steady"))
    except StopIteration:
        return []
    spread = Factors.of(paper.factors["63 workers"]).spread
    best = summed.entry("optimal")
    return [
        f"published: {_saved(PUBLISHED)} less training time than even at 64 nodes × 160 encoders",
        f"balance does not give that there: {_saved(chain.entry('optimal').reduction)} in the published "
        f"execution (at most {_saved(most_balanced_chain(spread))} with any workers whose slowest takes "
        f"{spread:g} times as long as the fastest), {_saved(steady.entry('optimal').reduction)} pipelined",
        f"leaving slow workers idle does: {_saved(best.reduction)} in the published execution with "
        f"{best.stages} of {summed.workers} ({gap(best.gap)})",
    ]


def _size(case: Case) -> str:
    return f"{case.nodes} × {case.encoders}"


def _saved(value: float) -> str:
    return percent(value, sign=False)


def _execution(paper: Paper, name: Execution, title: str) -> Table:
    head = ("nodes × encoders", "even", "dynamic", "heuristic", "optimal", "stages", "sure", CLOSED[name])
    rows = []
    for case in paper.cases:
        if case.execution != name:
            continue
        best = case.entry("optimal")
        rows.append(
            (
                _size(case),
                seconds(case.entry("even").time_s),
                *(_saved(case.entry(s).reduction) for s in ("dynamic", "heuristic", "optimal")),
                str(best.stages),
                gap(best.gap),
                _saved(case.limit),
            )
        )
    return Table(name, title, head, tuple(rows))


def _memory(paper: Paper) -> Table:
    rows = [
        (
            UNKNOWN if row.scale is None else f"{row.scale:g}",
            _saved(row.reduction),
            str(row.stages),
            gap(row.gap),
        )
        for row in paper.memory
    ]
    title = "What memory decides: the least sum at 64 × 160, where every worker has that part of a 16 GB card"
    return Table("memory", title, ("of a card", "saved", "stages", "sure"), tuple(rows))


def _formulas(paper: Paper) -> Table:
    sets = [(name, Factors.of(factors)) for name, factors in paper.factors.items()]
    sets += [(f"uniform in [1, {r:g}], many", Factors.uniform(r)) for r in (2.0, 3.5, 7.0)]
    rows: list[tuple[str, ...]] = []
    for name, devices in sets:
        rows.append(
            (
                name,
                f"{devices.spread:.2f}",
                _saved(devices.balanced_chain),
                _saved(most_balanced_chain(devices.spread)),
                _saved(devices.fastest_chain),
                _saved(devices.pipeline),
                _saved(most_pipeline(devices.spread)),
            )
        )
    needed = (
        spread_for(lambda r: Factors.uniform(r).balanced_chain, PUBLISHED),
        spread_for(most_balanced_chain, PUBLISHED),
        spread_for(lambda r: Factors.uniform(r).fastest_chain, PUBLISHED),
        spread_for(lambda r: Factors.uniform(r).pipeline, PUBLISHED),
        spread_for(most_pipeline, PUBLISHED),
    )
    last = f"slowest ÷ fastest for {PUBLISHED:.0%}"
    rows.append((last, "", *(f"{r:.3g}" for r in needed)))
    head = (
        "factors",
        "slowest ÷ fastest",
        "chain, balanced: 1 − H/A",
        "any factors",
        "chain, fastest alone: 1 − min/A",
        "pipeline: 1 − H/max",
        "any factors",
    )
    return Table(
        "formulas", "Saved against even at most, as formulas (last row: what 55% needs)", head, tuple(rows)
    )


def _executions(paper: Paper) -> Table:
    """The same batch in all executions, against the published even."""
    rows = []
    for case in paper.cases:
        if case.execution != "chain":
            continue
        try:
            others = [paper.case(case.nodes, case.encoders, name) for name in ("chain-sum", "step", "steady")]
        except StopIteration:
            continue
        summed, step, steady = others
        even_s = case.entry("even").time_s
        shown = (
            summed.entry("optimal").time_s,
            step.entry("even").time_s,
            step.entry("heuristic").time_s,
            steady.entry("even").time_s,
            steady.entry("optimal").time_s,
        )
        rows.append((_size(case), seconds(even_s), *(f"{seconds(s)}, {times(even_s / s)}" for s in shown)))
    head = (
        "nodes × encoders",
        "chain, even",
        "chain, least sum",
        "step, even",
        "step, heuristic",
        "steady, even",
        "steady, optimal",
    )
    title = "What the execution adds: seconds a batch, and how many times as fast as the published even"
    return Table("executions", title, head, tuple(rows))


def _planning(paper: Paper) -> Table:
    """Times to plan, which differ from run to run."""
    rows = []
    for size in dict.fromkeys((c.nodes, c.encoders) for c in paper.cases):
        cases: Sequence[Case] = [c for c in paper.cases if (c.nodes, c.encoders) == size]
        cells = []
        for case in cases:
            cells += [seconds(case.entry(s).plan_s) for s in ("heuristic", "optimal")]
        dynamic = seconds(cases[0].entry("dynamic").plan_s)
        rows.append((_size(cases[0]), str(cases[0].layers), dynamic, *cells))
    names = dict.fromkeys(case.execution for case in paper.cases)
    columns = tuple(f"{name}, {strategy}" for name in names for strategy in ("heuristic", "optimal"))
    head = ("nodes × encoders", "layers", "dynamic", *columns)
    return Table("planning", "Time to plan (wall time of this run)", head, tuple(rows))
