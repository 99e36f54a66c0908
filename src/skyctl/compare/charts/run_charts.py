"""Charts of one run while it trains: the loss, the seconds of a step, and what each device does in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyctl.compare.charts.chart import (
    ChartBar,
    ChartCurve,
    ChartLane,
    CurvePoint,
    LaneChart,
    LanePanel,
    LegendEntry,
    LineChart,
    Mark,
    TextPart,
    ValueAxis,
    VerticalLine,
    round_ticks,
)
from skyctl.compare.number_format import format_number, format_seconds
from skyctl.compare.run_figures import DeviceTimes, RunFigures, SeriesPoint

LOSS_LEGEND = (
    LegendEntry("line", "s-other1", "loss of the batches trained on"),
    LegendEntry("line", "s-optimal", "loss on held-out data"),
)
SECONDS_LEGEND = (
    LegendEntry("line", "s-measured", "measured"),
    LegendEntry("line", "s-predicted", "predicted by the attempt's plan"),
)
_LARGEST = 1e15
"""Beyond it a figure is not drawn; an axis could not be written for it."""


def run_loss_chart(figures: RunFigures) -> LineChart | None:
    """The loss by step. None: no step has a loss that can be drawn."""
    trained = _curve("loss", figures.unit, figures.loss, "other1", format_number)
    held_out = _curve("validation", figures.unit, figures.validation, "optimal", format_number)
    return _by_step("Loss", figures.unit, [trained, held_out], "loss")


def run_seconds_chart(figures: RunFigures) -> LineChart | None:
    """Seconds by step, with what each attempt's plan predicted. None: no step is known yet."""
    measured = _curve("measured", figures.unit, figures.seconds, "measured", format_seconds)
    if not measured.points:
        return None
    levels = [curve for curve in _predicted_levels(figures, measured.points[-1].x) if curve.points]
    top_s = max(point.y for curve in (measured, *levels) for point in curve.points)
    factor, unit = (1.0, "s") if top_s >= 2 else (1e3, "ms") if top_s >= 2e-3 else (1e6, "µs")
    words = f"{unit} a {figures.unit}"
    return _by_step("Seconds", figures.unit, [*levels, measured], words, factor=factor, from_zero=True)


def _curve(
    name: str,
    unit: str,
    points: Sequence[SeriesPoint],
    look: str,
    written: Callable[[float | None], str],
) -> ChartCurve:
    drawn = tuple(
        CurvePoint(point.step, point.value, f"{name}, {unit} {point.step:.0f}: {written(point.value)}")
        for point in points
        if abs(point.value) < _LARGEST  # neither NaN nor infinite
    )
    return ChartCurve(name, drawn, look, dots="filled" if len(drawn) < 2 else "none")


def _predicted_levels(figures: RunFigures, last: float) -> list[ChartCurve]:
    """A level line for each attempt whose plan predicts a step, from its first step to the next one's."""
    attempts = [attempt for attempt in figures.state.attempts if attempt.predicted_iteration_s is not None]
    curves = []
    for i, attempt in enumerate(attempts):
        begin = attempt.from_step + 1.0
        end = min(last, attempts[i + 1].from_step + 1.0) if i + 1 < len(attempts) else last
        step_s = attempt.predicted_iteration_s or 0.0
        words = f"predicted for attempt {attempt.number}: {format_seconds(step_s)}"
        ends = (begin, end) if end > begin else ()
        if step_s < _LARGEST:
            points = tuple(CurvePoint(at, step_s, words) for at in ends)
            curves.append(ChartCurve("predicted", points, "predicted", width=2.5, dashed=True))
    return curves


def _by_step(
    title: str,
    unit: str,
    curves: Sequence[ChartCurve],
    y_unit: str,
    *,
    factor: float = 1.0,
    from_zero: bool = False,
) -> LineChart | None:
    shown = tuple(curve for curve in curves if curve.points)
    if not shown:
        return None
    first = min(point.x for curve in shown for point in curve.points)
    last = max(point.x for curve in shown for point in curve.points)
    ticks = [value for value in round_ticks(last, 6) if value >= first and value == int(value)]
    ticks = [first, *(value for value in ticks if value - first > (last - first) / 12)]
    return LineChart(
        title,
        shown,
        (first, last),
        tuple((value, f"{value:.0f}") for value in ticks),
        unit,
        y_unit,
        f"{title} by {unit}",
        y_factor=factor,
        from_zero=from_zero,
    )


def run_devices_chart(figures: RunFigures) -> LaneChart | None:
    """A lane a device: which part of a step it computes, waits for the network, and for other devices."""
    timed = [device for device in figures.devices if 0 < device.step_s < _LARGEST]
    if not timed:
        return None
    steps = max(device.steps for device in timed)
    legend = [
        LegendEntry("swatch", "measured", "computing"),
        LegendEntry("swatch", "k-transfer", "waiting for the network"),
        LegendEntry("swatch", "hatched", "waiting for other devices"),
    ]
    if any(device.predicted_share is not None for device in timed):
        legend.append(LegendEntry("upright", "end", "computing, as predicted"))
    return LaneChart(
        "What each device does",
        ValueAxis(100.0, 1.0, "%", f"of a {figures.unit}"),
        (LanePanel(tuple(_device_lane(device) for device in timed)),),
        summary=(TextPart(f"the newest {steps} {figures.unit}s, on average"),) if steps > 1 else (),
        legend=tuple(legend),
        lane_height=28,
    )


def _device_lane(device: DeviceTimes) -> ChartLane:
    marks: list[Mark] = []
    at, parts = 0.0, []
    for words, look, seconds in (
        ("computing", "measured", device.compute_s),
        ("waiting for the network", "k-transfer", device.transfer_s),
        ("waiting for other devices", "hatched", device.idle_s),
    ):
        part = 100 * seconds / device.step_s
        parts.append(f"{words} {part:.0f}% ({format_seconds(seconds)})")
        if part > 0:
            marks.append(ChartBar(at, part, 5, 18, look, f"{device.device}: {parts[-1]}"))
        at += part
    details: tuple[str, ...] = ()
    if device.predicted_share is not None:
        share = 100 * min(1.0, max(0.0, device.predicted_share))
        marks.append(VerticalLine(share, 1, 27, "end"))
        details = (f"predicted {share:.0f}%",)
    return ChartLane(
        device.device,
        tuple(marks),
        f"{device.device}: {', '.join(parts)}",
        value=f"{100 * device.compute_s / device.step_s:.0f}%",
        remark=" computing",
        details=details,
    )
