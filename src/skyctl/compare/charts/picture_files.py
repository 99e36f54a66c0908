"""Which pictures are written to a comparison's folder, and what is drawn in each."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from skyctl.compare.charts.chart import Chart, ChartGroup, LegendEntry
from skyctl.compare.charts.curve_charts import loss_charts, strategy_legend, sweep_chart
from skyctl.compare.charts.device_charts import device_speed_chart
from skyctl.compare.charts.step_charts import bound_chart, prediction_chart, share_charts, step_time_chart
from skyctl.compare.charts.timeline_charts import timeline_charts
from skyctl.compare.report_data import ComparisonReport


class PictureFile(NamedTuple):
    """``name``: under which ``comparison.json`` has its path."""

    name: str
    file: str
    groups: tuple[ChartGroup, ...]


def picture_files(report: ComparisonReport) -> list[PictureFile]:
    """One a subject, in the report's order; none of what there are no figures for."""
    failures = tuple(f"{row.strategy}: {row.error}" for row in report.rows if row.error)
    steps = replace(step_time_chart(report), notes=failures)
    files = [PictureFile("plot", "comparison.svg", (_single(steps), share_charts(report)))]
    if report.devices:
        files.append(PictureFile("cluster", "cluster.svg", (_single(device_speed_chart(report)),)))
    if report.links is not None and len(report.links.names) > 1:
        files.append(PictureFile("links", "links.svg", (_single(report.links),)))
    if report.routes is not None:
        files.append(PictureFile("routes", "routes.svg", (report.routes.charts,)))
    if any(step.simulated is not None for step in report.steps.values()):
        files.append(PictureFile("steps", "steps.svg", (timeline_charts(report),)))
    if bound := bound_chart(report):
        files.append(PictureFile("bound", "bound.svg", (_single(bound),)))
    if report.measured:
        files.append(PictureFile("prediction", "prediction.svg", (_single(prediction_chart(report)),)))
        files.append(PictureFile("losses", "losses.svg", (loss_charts(report),)))
    for sweep in report.sweeps:
        legend = strategy_legend(sweep.strategies, sweep.strategies)
        chart = sweep_chart(sweep)
        groups = (_single(chart, legend),) if chart is not None else ()
        files.append(PictureFile(f"{sweep.kind} sweep", f"sweep-{sweep.kind}.svg", groups))
    return files


def _single(chart: Chart, legend: tuple[LegendEntry, ...] = ()) -> ChartGroup:
    return ChartGroup(((chart,),), legend)
