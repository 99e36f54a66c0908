"""Charts of curves: the loss by step and by time, and a sweep's step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from skyctl.compare.charts.chart import (
    ChartCurve,
    ChartGroup,
    CurvePoint,
    LegendEntry,
    LineChart,
    round_ticks,
    strategy_look,
)
from skyctl.compare.number_format import format_seconds
from skyctl.compare.report_data import ComparisonReport
from skyctl.compare.sweeps import ComparisonSweep
from skyctl.records.measurement import Measurement

SWEEP_TITLES = {
    "microbatches": "More or fewer microbatches",
    "nodes": "Machines added one by one, the fastest first",
}
MAX_SWEEP_TICKS = 13
"""Of a sweep with more points not every value is written at the axis."""


def loss_charts(report: ComparisonReport) -> ChartGroup:
    """By step, where the curves of all plans coincide, and by time; no charts where nothing was run.

    A round stands at as many steps as it counts as.
    """
    runs = [(o.strategy, o.measurement) for o in report.outcomes if o.measurement is not None]
    if not runs:
        return ChartGroup(())
    strategies = [row.strategy for row in report.rows]
    counts = {row.strategy: row.steps_per_iteration for row in report.rows}
    charts = (_loss_by_step(runs, strategies, counts), _loss_by_time(runs, strategies))
    return ChartGroup((charts,), strategy_legend([strategy for strategy, _ in runs], strategies))


def strategy_legend(shown: Sequence[str], strategies: Sequence[str]) -> tuple[LegendEntry, ...]:
    """A line each for the strategies ``shown``, of all ``strategies``."""
    return tuple(LegendEntry("line", f"s-{strategy_look(name, strategies)}", name) for name in shown)


def _loss_by_step(
    runs: Sequence[tuple[str, Measurement]], strategies: Sequence[str], counts: Mapping[str, float]
) -> LineChart:
    """``counts``: by strategy, how many steps one of its run's counts as."""
    curves = tuple(
        ChartCurve(
            strategy,
            tuple(
                CurvePoint(at, s.loss, f"{strategy}, step {at:g}: {s.loss:.4f}")
                for s in run.steps
                for at in [(s.step + 1) * counts[strategy]]
            ),
            strategy_look(strategy, strategies),
            width=2.0 + 2.5 * (len(runs) - 1 - i),
            dots="filled" if len(run.steps) == 1 else "none",
        )
        for i, (strategy, run) in enumerate(runs)
    )
    last = max(point.x for curve in curves for point in curve.points)
    first = min(point.x for curve in curves for point in curve.points)
    ticks = [value for value in round_ticks(last, 6) if value >= first and value == int(value)]
    ticks = [first, *(value for value in ticks if value - first > (last - first) / 12)]
    written = tuple((value, f"{value:.0f}") for value in ticks)
    return LineChart("By step", curves, (first, last), written, "step", "loss", "Loss by step")


def _loss_by_time(runs: Sequence[tuple[str, Measurement]], strategies: Sequence[str]) -> LineChart:
    curves = []
    for strategy, run in runs:
        ends_s = accumulate(step.iteration_s for step in run.steps)
        points = tuple(
            CurvePoint(at_s, step.loss, f"{strategy}, {format_seconds(at_s)}: {step.loss:.4f}")
            for at_s, step in zip(ends_s, run.steps, strict=True)
        )
        curves.append(ChartCurve(strategy, points, strategy_look(strategy, strategies), dots="filled"))
    last_s = max(curve.points[-1].x for curve in curves)
    ticks = tuple((value, f"{value:g}") for value in round_ticks(last_s, 5))
    return LineChart(
        "By time", tuple(curves), (0.0, last_s), ticks, "seconds of training", "loss", "Loss by time"
    )


def sweep_chart(sweep: ComparisonSweep) -> LineChart | None:
    """The step over what was varied: hollow dots are predicted, filled ones measured. None: no plan fits."""
    curves = _sweep_curves(sweep)
    if not curves:
        return None
    top_s = max(point.y for curve in curves for point in curve.points)
    factor, unit = (1.0, "s") if top_s >= 2 else (1e3, "ms") if top_s >= 2e-3 else (1e6, "µs")
    last = max(1, len(sweep.points) - 1)
    ticks = tuple((float(i), str(point.value)) for i, point in enumerate(sweep.points))
    return LineChart(
        SWEEP_TITLES[sweep.kind],
        curves,
        (-0.04 * last, last * 1.04) if len(sweep.points) > 1 else (-1.0, 1.0),
        ticks if len(ticks) <= MAX_SWEEP_TICKS else ticks[:: -(-len(ticks) // 12)],
        sweep.kind,
        f"{unit} a step",
        f"Step by {sweep.kind}",
        y_factor=factor,
        from_zero=True,
    )


def _sweep_curves(sweep: ComparisonSweep) -> tuple[ChartCurve, ...]:
    """Two a strategy: what is predicted as a line, what was measured as dots."""
    curves = []
    for i, strategy in enumerate(sweep.strategies):
        for measured in (False, True):
            points = []
            for at, step_s in sweep.line(strategy, measured):
                point = sweep.points[at]
                added = f" with {point.added}" if point.added else ""
                which = "measured" if measured else "predicted"
                tooltip = f"{strategy}, {point.value} {sweep.kind}{added}: {format_seconds(step_s)} {which}"
                points.append(CurvePoint(float(at), step_s, tooltip))
            if points:
                curves.append(
                    ChartCurve(
                        strategy,
                        tuple(points),
                        strategy_look(strategy, sweep.strategies),
                        width=2.0 + 1.2 * (len(sweep.strategies) - 1 - i),
                        dots="filled" if measured else "hollow",
                        joined=not measured,
                    )
                )
    return tuple(curves)
