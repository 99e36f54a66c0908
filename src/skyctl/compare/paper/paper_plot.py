"""The experiment as one picture: what balance saves by how unequal devices are, and the largest size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
from skyctl.compare.charts.png import write_png
from skyctl.compare.number_format import format_seconds
from skyctl.compare.paper.closed_forms import SlowdownFactors, max_balanced_chain_saving, max_pipeline_saving
from skyctl.compare.paper.paper_result import PUBLISHED_REDUCTION, PaperResult

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


def plot_paper(paper: PaperResult, path: str | Path) -> Path:
    """Draws both charts to a PNG file.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    legend = (
        LegendEntry("line", f"s-{_CHAIN}", "chain, balanced"),
        LegendEntry("line", f"s-{_FASTEST}", "chain, fastest alone"),
        LegendEntry("line", f"s-{_PIPELINE}", "pipeline, balanced"),
        LegendEntry("line", f"s-{_EVEN}", "published: 55%"),
        LegendEntry("dot", f"d-{_PIPELINE}", "the experiment (lines: factors uniform; dashed: any factors)"),
    )
    return write_png(path, ChartGroup(((_savings_chart(paper), _largest_size_chart(paper)),), legend))


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
