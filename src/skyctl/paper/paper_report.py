"""The experiment for people: tables for a terminal, a pipe and ``docs/paper.md``, and one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from skyctl.compare.charts.chart import (
    ChartBar,
    ChartCurve,
    ChartGroup,
    ChartLane,
    CurvePoint,
    LaneChart,
    LanePanel,
    LegendEntry,
    LineChart,
    TextPart,
    seconds_axis,
)
from skyctl.compare.charts.svg_file import write_svg
from skyctl.compare.number_format import UNKNOWN, format_gap, format_percent, format_ratio, format_seconds
from skyctl.paper.paper_result import (
    PUBLISHED_REDUCTION,
    Execution,
    PaperCase,
    PaperResult,
    SlowdownFactors,
    max_balanced_chain_saving,
    max_pipeline_saving,
    spread_needed,
)

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
_OURS = ("dynamic", "heuristic", "optimal")
_SHOWN: tuple[tuple[Execution, str, str], ...] = (
    ("chain-sum", "optimal", "chain, least sum"),
    ("step", "even", "step, even"),
    ("step", "heuristic", "step, heuristic"),
    ("steady", "even", "steady, even"),
    ("steady", "optimal", "steady, optimal"),
)
"""(execution, strategy, heading) of the executions' table."""
_RULES: tuple[tuple[str, Callable[[SlowdownFactors], float]], ...] = (
    ("chain, balanced: 1 − H/A", lambda devices: devices.balanced_chain),
    ("any factors", lambda devices: max_balanced_chain_saving(devices.spread)),
    ("chain, fastest alone: 1 − min/A", lambda devices: devices.fastest_chain),
    ("pipeline: 1 − H/max", lambda devices: devices.pipeline),
    ("any factors", lambda devices: max_pipeline_saving(devices.spread)),
)
"""(heading, what is saved against even) of each closed form."""


_SPREADS = [1 + 9 * i / 180 for i in range(181)]

_CHAIN, _FASTEST, _PIPELINE, _EVEN = "other1", "other0", "optimal", "even"

_BARS = (
    ("chain", "even", "chain, even", _EVEN),
    ("chain", "dynamic", "chain, dynamic", _CHAIN),
    ("chain", "optimal", "chain, optimal", _CHAIN),
    ("chain-sum", "optimal", "chain, least sum", _FASTEST),
    ("step", "even", "step, even", _EVEN),
    ("step", "optimal", "step, optimal", _PIPELINE),
    ("steady", "even", "steady, even", _EVEN),
    ("steady", "optimal", "steady, optimal", _PIPELINE),
)
"""(execution, strategy, what it is called, look) of each bar at the largest size."""


class PaperTable(NamedTuple):
    """A table in text. ``name``: of its section in ``docs/paper.md``."""

    name: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def paper_tables(paper: PaperResult) -> list[PaperTable]:
    """The tables of the experiment, in the order of reading; those without rows are left out."""
    tables = [_execution(paper, name, title) for name, title in TITLES.items()]
    tables += [_memory(paper), _formulas(paper), _executions(paper), _planning(paper)]
    return [table for table in tables if table.rows]


def describe_paper(paper: PaperResult) -> list[str]:
    """The experiment's results, in a few sentences; empty where the largest size was not run."""
    try:
        chain, summed, steady = (paper.case(64, 160, name) for name in ("chain", "chain-sum", "steady"))
    except StopIteration:
        return []
    spread = SlowdownFactors.of(paper.factors["63 workers"]).spread
    best = summed.entry("optimal")
    return [
        f"published: {_saved(PUBLISHED_REDUCTION)} less training time than even at 64 nodes × 160 encoders",
        f"balance does not give that there: {_saved(chain.entry('optimal').reduction)} in the published "
        f"execution (at most {_saved(max_balanced_chain_saving(spread))} with any workers whose slowest "
        f"takes {spread:g} times as long as the fastest), "
        f"{_saved(steady.entry('optimal').reduction)} pipelined",
        f"leaving slow workers idle does: {_saved(best.reduction)} in the published execution with "
        f"{best.stages} of {summed.workers} ({format_gap(best.gap)})",
    ]


def _size(case: PaperCase) -> str:
    return f"{case.nodes} × {case.encoders}"


def _saved(value: float) -> str:
    return format_percent(value, sign=False)


def _execution(paper: PaperResult, name: Execution, title: str) -> PaperTable:
    """The strategies' savings in one execution, a row a size."""
    head = ("nodes × encoders", "even", *_OURS, "stages", "sure", CLOSED[name])
    rows = []
    for case in paper.cases:
        if case.execution == name:
            best, savings = case.entry("optimal"), [_saved(case.entry(s).reduction) for s in _OURS]
            cells = _size(case), format_seconds(case.entry("even").time_s), *savings
            rows.append((*cells, str(best.stages), format_gap(best.gap), _saved(case.limit)))
    return PaperTable(name, title, head, tuple(rows))


def _memory(paper: PaperResult) -> PaperTable:
    """The least sum under memory limits, a row a limit."""
    rows = []
    for row in paper.memory:
        scale = UNKNOWN if row.scale is None else f"{row.scale:g}"
        rows.append((scale, _saved(row.reduction), str(row.stages), format_gap(row.gap)))
    title = "What memory decides: the least sum at 64 × 160, where every worker has that part of a 16 GB card"
    return PaperTable("memory", title, ("of a card", "saved", "stages", "sure"), tuple(rows))


def _formulas(paper: PaperResult) -> PaperTable:
    """The most that each rule saves, a row a set of devices; last, the spread that it needs for the 55%."""
    sets = [(name, SlowdownFactors.of(factors)) for name, factors in paper.factors.items()]
    sets += [(f"uniform in [1, {r:g}], many", SlowdownFactors.uniform(r)) for r in (2.0, 3.5, 7.0)]
    rows = [
        (name, f"{devices.spread:.2f}", *(_saved(saving(devices)) for _, saving in _RULES))
        for name, devices in sets
    ]
    needed = [f"{spread_needed(saving, PUBLISHED_REDUCTION):.3g}" for _, saving in _RULES]
    rows.append((f"slowest ÷ fastest for {PUBLISHED_REDUCTION:.0%}", "", *needed))
    head = ("factors", "slowest ÷ fastest", *(heading for heading, _ in _RULES))
    title = "Saved against even at most, as formulas (last row: what 55% needs)"
    return PaperTable("formulas", title, head, tuple(rows))


def _executions(paper: PaperResult) -> PaperTable:
    """The same batch in all executions, against the published even."""
    by_size = {(c.nodes, c.encoders, c.execution): c for c in paper.cases}
    rows = []
    for case in paper.cases:
        size = case.nodes, case.encoders
        if case.execution == "chain" and all((*size, execution) in by_size for execution in TITLES):
            even_s = case.entry("even").time_s
            times_s = [by_size[*size, execution].entry(s).time_s for execution, s, _ in _SHOWN]
            cells = (f"{format_seconds(s)}, {format_ratio(even_s / s)}" for s in times_s)
            rows.append((_size(case), format_seconds(even_s), *cells))
    head = ("nodes × encoders", "chain, even", *(heading for _, _, heading in _SHOWN))
    title = "What the execution adds: seconds a batch, and how many times as fast as the published even"
    return PaperTable("executions", title, head, tuple(rows))


def _planning(paper: PaperResult) -> PaperTable:
    """Times to plan, which differ from run to run."""
    rows = []
    for size in dict.fromkeys((c.nodes, c.encoders) for c in paper.cases):
        cases = [c for c in paper.cases if (c.nodes, c.encoders) == size]
        times = [format_seconds(c.entry(s).plan_s) for c in cases for s in ("heuristic", "optimal")]
        dynamic = format_seconds(cases[0].entry("dynamic").plan_s)
        rows.append((_size(cases[0]), str(cases[0].layers), dynamic, *times))
    names = dict.fromkeys(case.execution for case in paper.cases)
    columns = tuple(f"{name}, {strategy}" for name in names for strategy in ("heuristic", "optimal"))
    head = ("nodes × encoders", "layers", "dynamic", *columns)
    return PaperTable("planning", "Time to plan (wall time of this run)", head, tuple(rows))


def plot_paper(paper: PaperResult, path: str | Path) -> Path:
    """Draws both charts to an SVG file.

    Raises:
        SkyctlError: the file can't be written.
    """
    legend = (
        LegendEntry("line", f"s-{_CHAIN}", "chain, balanced"),
        LegendEntry("line", f"s-{_FASTEST}", "chain, fastest alone"),
        LegendEntry("line", f"s-{_PIPELINE}", "pipeline, balanced"),
        LegendEntry("line", f"s-{_EVEN}", "published: 55%"),
        LegendEntry("dot", f"d-{_PIPELINE}", "the experiment (lines: factors uniform; dashed: any factors)"),
    )
    return write_svg(path, ChartGroup(((_savings_chart(paper), _largest_size_chart(paper)),), legend))


def _savings_chart(paper: PaperResult) -> LineChart:
    """Reduction against even over slowest ÷ fastest: formulas as lines, the experiment's sizes as points."""
    uniform = [SlowdownFactors.uniform(r) for r in _SPREADS]
    curves = [
        _curve(_CHAIN, _SPREADS, [d.balanced_chain for d in uniform]),
        _curve(_CHAIN, _SPREADS, [max_balanced_chain_saving(r) for r in _SPREADS], dashed=True),
        _curve(_FASTEST, _SPREADS, [d.fastest_chain for d in uniform]),
        _curve(_PIPELINE, _SPREADS, [d.pipeline for d in uniform]),
        _curve(_PIPELINE, _SPREADS, [max_pipeline_saving(r) for r in _SPREADS], dashed=True),
        _curve(_EVEN, [1.0, 10.0], [PUBLISHED_REDUCTION] * 2),
    ]
    for execution, look in (("chain", _CHAIN), ("chain-sum", _FASTEST), ("steady", _PIPELINE)):
        cases = [case for case in paper.cases if case.execution == execution]
        spreads = [SlowdownFactors.of(paper.factors[f"{case.workers} workers"]).spread for case in cases]
        saved = [case.entry("optimal").reduction for case in cases]
        curves.append(_curve(look, spreads, saved, joined=False))
    return LineChart(
        "Saved against an even split, at most",
        tuple(curves),
        (1.0, 10.0),
        tuple((float(x), str(x)) for x in (1, 2, 4, 6, 8, 10)),
        "slowest ÷ fastest",
        "%",
        "Saved by how unequal devices are",
        y_factor=100,
        from_zero=True,
    )


def _curve(
    look: str, xs: Sequence[float], ys: Sequence[float], *, dashed: bool = False, joined: bool = True
) -> ChartCurve:
    points = tuple(CurvePoint(x, y, "") for x, y in zip(xs, ys, strict=True))
    return ChartCurve(look, points, look, dots="none" if joined else "filled", joined=joined, dashed=dashed)


def _largest_size_chart(paper: PaperResult) -> LaneChart:
    """Seconds a batch takes at the largest size, a lane an execution and strategy."""
    nodes, encoders = max((case.nodes, case.encoders) for case in paper.cases)
    cases = {c.execution: c for c in paper.cases if (c.nodes, c.encoders) == (nodes, encoders)}
    times_s = [
        (name, cases[execution].entry(strategy).time_s, look)
        for execution, strategy, name, look in _BARS
        if execution in cases
    ]
    lanes = tuple(
        ChartLane(name, (ChartBar(0, time_s, 6, 16, f"d-{look}"),), name, value=format_seconds(time_s))
        for name, time_s, look in times_s
    )
    return LaneChart(
        f"A batch at {nodes} nodes × {encoders} encoders",
        seconds_axis(max(time_s for _, time_s, _ in times_s), "a batch"),
        (LanePanel(lanes),),
        summary=(TextPart("shorter is better"),),
        lane_height=28,
    )
