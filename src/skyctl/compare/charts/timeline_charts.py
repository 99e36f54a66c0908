"""Charts of one step, action by action: as simulated, and as traced where the run was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from skyctl.compare.charts.chart import (
    BarNumber,
    ChartBar,
    ChartGroup,
    ChartLane,
    LaneChart,
    LanePanel,
    LegendEntry,
    Mark,
    TextPart,
    ValueAxis,
    VerticalLine,
    seconds_axis,
)
from skyctl.compare.charts.svg_file import write_svg
from skyctl.compare.number_format import format_percent, format_seconds
from skyctl.compare.report_data import ComparisonReport, StepTimelines
from skyctl.compare.timeline import IDLE, KIND_LABELS, TRANSFER, Timeline, TimelineSpan

MAX_SEPARATE_BARS = 2500
"""With more bars than this in a panel, those of a kind are one shape, without tooltip of their own."""
MAX_NUMBERED_LANES = 16
"""With more stages than this the lanes are thin, and bars have no numbers."""
LEAST_NUMBERED_PERCENT = 1.75
"""Of the axis: a narrower bar has no room for its microbatch's number."""
SHORTEST_SHARE = 2e-4
"""Of the axis: shorter spans are not drawn."""
LEGEND_TEXTS = {**KIND_LABELS, "S": "sending"}
_DRAWING_ORDER = (IDLE, TRANSFER, "S", "F", "B", "W", "R", "O", "C")


def timeline_charts(report: ComparisonReport) -> ChartGroup:
    """A chart a plan, all on one scale of time; no charts where there is nothing to simulate."""
    plans = []
    for rows, name in report.groups():
        steps = report.steps.get(rows[0].strategy, StepTimelines())
        if steps.simulated is not None:
            plans.append((name, {share.device: share.label for share in rows[0].shares}, steps))
    return _chart_group(plans)


def plot_trace(measured: Timeline, simulated: Timeline, path: str | Path) -> Path:
    """Draws a typical measured step above the simulated one, as an SVG.

    Raises:
        SkyctlError: the file can't be written.
    """
    return write_svg(path, _chart_group([("One step", {}, StepTimelines(simulated, measured))]))


def _chart_group(plans: Sequence[tuple[str, Mapping[str, str], StepTimelines]]) -> ChartGroup:
    lengths_s = [panel[2] for _, _, steps in plans for panel in _panels(steps)]
    if not lengths_s:
        return ChartGroup(())
    axis = seconds_axis(max(lengths_s), "from the step's start", 1.005)
    kinds = {span.kind for _, _, steps in plans for _, spans, _ in _panels(steps) for span in spans}
    legend = [
        LegendEntry("swatch", f"k-{kind}", text) for kind, text in LEGEND_TEXTS.items() if kind in kinds
    ]
    charts = [_chart(name, labels, steps, axis) for name, labels, steps in plans]
    return ChartGroup(tuple((chart,) for chart in charts), tuple(legend))


def _panels(steps: StepTimelines) -> list[tuple[str, Sequence[TimelineSpan], float]]:
    """(what it is, its spans, its seconds) each: the typical measured step, then the simulated one."""
    panels: list[tuple[str, Sequence[TimelineSpan], float]] = []
    if steps.measured is not None and steps.measured.steps:
        typical = steps.measured.typical()
        panels.append(
            (f"measured, step {typical.number + 1}", steps.measured.within(typical), typical.seconds)
        )
    if steps.simulated is not None:
        step = steps.simulated.steps[0]
        panels.append(("simulated", step.spans, step.seconds))
    return panels


def _chart(name: str, labels: Mapping[str, str], steps: StepTimelines, axis: ValueAxis) -> LaneChart:
    assert steps.simulated is not None
    devices = [labels.get(device, device) for device in steps.simulated.devices]
    simulated_s = steps.simulated.steps[0].seconds
    panels = []
    for i, (what, spans, length_s) in enumerate(_panels(steps)):
        measured = i == 0 and steps.measured is not None
        error = (
            f", {format_percent(length_s / simulated_s - 1)} against the simulated one"
            if measured and simulated_s
            else ""
        )
        heading = (TextPart(what, "strong"), TextPart(f": {format_seconds(length_s)}{error}"))
        panels.append(_panel(heading, devices, spans, length_s, axis))
    count = len(devices)
    summed = any(span.kind == "R" for span in steps.simulated.steps[0].spans)
    rows = ("pipeline" if summed else "stage") + ("" if count == 1 else "s")
    return LaneChart(
        name,
        axis,
        tuple(panels),
        summary=(TextPart(f"{count} {rows}"),),
        lane_height=9 if count > MAX_NUMBERED_LANES else 22,
        dense=True,
    )


def _panel(
    heading: tuple[TextPart, ...],
    devices: Sequence[str],
    spans: Sequence[TimelineSpan],
    length_s: float,
    axis: ValueAxis,
) -> LanePanel:
    merged = len(spans) > MAX_SEPARATE_BARS or len(devices) > MAX_NUMBERED_LANES
    height = 9 if len(devices) > MAX_NUMBERED_LANES else 22
    lanes = []
    for stage, device in enumerate(devices):
        own = [s for s in spans if s.stage == stage and s.seconds > SHORTEST_SHARE * axis.end]
        busy_s = sum(span.seconds for span in own if span.kind not in (IDLE, TRANSFER, "S", "R"))
        marks = _merged_bars(own, height) if merged else _numbered_bars(own, axis)
        end = VerticalLine(length_s, -1, height + 1, "end")
        label = f"{device}: computes {format_seconds(busy_s)} of the step"
        lanes.append(ChartLane(device, (*marks, end), label))
    return LanePanel(tuple(lanes), heading, merged)


def _numbered_bars(spans: Sequence[TimelineSpan], axis: ValueAxis) -> list[Mark]:
    """A bar a span, with its microbatch's number where it has room; waits are thin, and under the others."""
    marks: list[Mark] = []
    for span in sorted(spans, key=lambda span: span.kind not in (IDLE, TRANSFER)):
        top, height = (7, 8) if span.kind in (IDLE, TRANSFER) else (2, 18)
        number = "" if span.kind in ("O", "C", "R") else f" {span.microbatch}"
        tooltip = f"{KIND_LABELS[span.kind]}{number}: {format_seconds(span.seconds)}"
        tooltip = f"{tooltip}, from {format_seconds(max(0.0, span.start_s))}"
        marks.append(ChartBar(span.start_s, span.seconds, top, height, f"k-{span.kind}", tooltip))
        if span.kind in ("F", "B", "W") and axis.percent(span.seconds) >= LEAST_NUMBERED_PERCENT:
            middle_s = (span.start_s + span.end_s) / 2
            marks.append(BarNumber(middle_s, 15, str(span.microbatch), f"on-{span.kind}"))
    return marks


def _merged_bars(spans: Sequence[TimelineSpan], height: int) -> list[Mark]:
    """Bars without tooltip, those of a kind together."""
    unit = height / 9
    marks: list[Mark] = []
    for kind in _DRAWING_ORDER:
        top, tall = (3 * unit, 3 * unit) if kind in (IDLE, TRANSFER) else (unit, 7 * unit)
        own = [span for span in spans if span.kind == kind]
        marks += [ChartBar(span.start_s, span.seconds, top, tall, f"k-{kind}") for span in own]
    return marks
