"""Charts of the strategies' steps: their times, who holds which layers, predicted and measured, the bound."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.compare.charts.chart import (
    ChartBar,
    ChartDot,
    ChartGroup,
    ChartLane,
    HorizontalLine,
    LaneChart,
    LanePanel,
    LegendEntry,
    Mark,
    TextPart,
    ValueAxis,
    VerticalLine,
    seconds_axis,
    whisker,
)
from skyctl.compare.number_format import (
    UNKNOWN,
    estimate_parts,
    format_bytes,
    format_estimate,
    format_percent,
    format_ratio,
    format_seconds,
)
from skyctl.compare.outcome import ComparisonRow, DeviceShare
from skyctl.compare.report_data import ComparisonReport
from skyctl.records.plan import Plan

MAX_DRAWN_LAYERS = 160
"""With more layers on a device their borders are not drawn."""


def step_time_chart(report: ComparisonReport) -> LaneChart:
    """A lane a strategy: its step as predicted and as measured, and the bound."""
    bounded = any(_bound_s(row) is not None for row in report.planned)
    has_intervals = any(row.predicted_interval for row in report.planned)
    interval = ", with its 80% interval" if has_intervals else ""
    legend = [LegendEntry("swatch", "predicted", f"predicted{interval}")]
    if report.measured:
        legend.append(LegendEntry("swatch", "measured", "measured: median, with p10 to p90"))
    if bounded:
        text = f"the bound: no {report.bounded_name} is predicted faster (proved)"
        legend.append(LegendEntry("upright", "bound", text))
    return LaneChart(
        "One training step",
        seconds_axis(_longest_s(report), "a step"),
        (LanePanel(tuple(_step_lane(row, _bound_s(row)) for row in report.planned)),),
        summary=(TextPart("shorter is better"),),
        legend=tuple(legend),
    )


def _bound_s(row: ComparisonRow) -> float | None:
    """No plan of that row's problem is predicted faster; None: nothing is claimed of steps."""
    return row.bound_s if row.bound_s and row.objective == "iteration" else None


def _step_lane(row: ComparisonRow, bound_s: float | None) -> ChartLane:
    step_s = row.predicted_s or 0.0
    top, height = (3, 13) if row.measured else (8, 18)
    predicted = format_estimate(row.predicted_s, row.predicted_interval)
    tooltip = f"{row.label}, predicted: {predicted}"
    marks: list[Mark] = [ChartBar(0, step_s, top, height, "predicted", tooltip)]
    if row.predicted_interval is not None:
        marks += whisker(row.predicted_interval.low_s, row.predicted_interval.high_s, top + height / 2, 3.5)
    label = f"{row.label}: predicted {predicted}"
    if row.measured:
        took = row.measured
        spread = f"p10 {format_seconds(took.p10)}, p90 {format_seconds(took.p90)}"
        tooltip = f"{row.label}, measured: {format_seconds(row.measured_s)}, {spread}"
        marks.append(ChartBar(0, row.measured_s or 0.0, 18, 13, "measured", tooltip))
        marks += whisker(took.p10, took.p90, 24.5, 3.5)
        label += f", measured {format_seconds(row.measured_s)}"
    if bound_s is not None:
        marks.append(VerticalLine(bound_s, 0, 34, "bound"))
    details = (f"predicted {predicted}",) if row.measured else ()
    if not row.measured and row.predicted_interval is not None:
        details = (estimate_parts(row.predicted_s, row.predicted_interval)[1],)
    return ChartLane(
        row.label,
        tuple(marks),
        label,
        value=format_seconds(row.shown_s),
        remark=f" · {format_ratio(row.shown_speedup)}" if row.shown_speedup else "",
        details=details,
    )


def share_charts(report: ComparisonReport) -> ChartGroup:
    """A chart a plan: a lane a device, in the pipeline's order, with its layers' work and its idle time."""
    legend = [
        LegendEntry("swatch", "predicted", "computing, as predicted; a part a layer"),
        LegendEntry("swatch", "hatched", "idle"),
        LegendEntry("upright", "end", "end of the step"),
    ]
    if any(row.predicted_sync_s for row in report.planned):
        legend.insert(2, LegendEntry("swatch", "k-R", "summing gradients, once all have computed"))
    if report.measured:
        legend.insert(1, LegendEntry("swatch", "measured", "computing, as measured"))
        legend.append(LegendEntry("upright", "end seen", "end of the step, measured"))
    axis = seconds_axis(_longest_s(report), "of a step")
    charts = [_share_chart(report, rows, name, axis) for rows, name in report.groups()]
    return ChartGroup(tuple((chart,) for chart in charts), tuple(legend))


def _share_chart(
    report: ComparisonReport, rows: Sequence[ComparisonRow], name: str, axis: ValueAxis
) -> LaneChart:
    row, plan = rows[0], report.plan(rows[0].strategy)
    step, *interval = estimate_parts(row.predicted_s, row.predicted_interval)
    summary = [TextPart(step, "strong"), TextPart(" ".join(["", *interval, "predicted"]))]
    if row.measured:
        measured = TextPart(format_seconds(row.measured_s), "strong")
        summary += [TextPart(" · "), measured, TextPart(" measured")]
    if row.shown_speedup is not None:
        summary.append(TextPart(f" · {format_ratio(row.shown_speedup)}"))
    caption: list[TextPart] = []
    if row.unused:
        names = [
            (TextPart(", " if i else ""), TextPart(device, "name")) for i, device in enumerate(row.unused)
        ]
        reasons = "; ".join(dict.fromkeys(left_out.reason for left_out in plan.unused))
        caption = [TextPart("Unused: "), *(part for pair in names for part in pair), TextPart(f". {reasons}")]
    lanes = tuple(_share_lane(report, row, share, plan) for share in row.shares)
    return LaneChart(name, axis, (LanePanel(lanes),), summary=tuple(summary), caption=tuple(caption))


def _share_lane(report: ComparisonReport, row: ComparisonRow, share: DeviceShare, plan: Plan) -> ChartLane:
    measured_s, step_s = share.measured_compute_s, row.predicted_s or 0.0
    top, height = (2, 19) if measured_s is not None else (6, 22)
    busy_s = min(share.predicted_compute_s, step_s) if step_s else share.predicted_compute_s
    marks: list[Mark] = []
    if step_s > busy_s:
        idle = f"{share.label}: idle {format_seconds(step_s - busy_s)} of a step"
        marks.append(ChartBar(busy_s, step_s - busy_s, top, height, "hatched", idle))
    marks += _layer_marks(share, plan, busy_s, top, height)
    if row.predicted_sync_s:
        sync = f"gradients are summed: {format_seconds(row.predicted_sync_s)} after the last backward"
        marks.append(ChartBar(step_s - row.predicted_sync_s, row.predicted_sync_s, top, height, "k-R", sync))
    if measured_s is not None:
        tooltip = f"computed {format_seconds(measured_s)} of a step as measured"
        tooltip = f"{share.label}: {tooltip}, predicted {format_seconds(busy_s)}"
        marks.append(ChartBar(0, measured_s, 24, 6, "measured", tooltip))
    marks.append(VerticalLine(step_s, -3, 37, "end"))
    if row.measured:
        marks.append(VerticalLine(row.measured_s or 0.0, -3, 37, "end seen"))
    count = share.stop - share.start
    return ChartLane(
        share.label,
        tuple(marks),
        f"{share.label}: {count} layers, busy {format_seconds(busy_s)} of {format_seconds(step_s)}",
        notes=(_share_note(share, plan),),
        value=format_seconds(busy_s),
        remark=f" · {busy_s / step_s:.0%} busy" if step_s else "",
        details=_memory_texts(report, row, share, plan),
    )


def _share_note(share: DeviceShare, plan: Plan) -> str:
    if share.microbatches is None:
        return f"layers {share.start}–{share.stop} · {share.stop - share.start}"
    samples = "" if share.samples is None else f" · {share.samples} samples"
    return f"{share.microbatches} of {plan.problem.microbatches} microbatches{samples}"


def _layer_marks(share: DeviceShare, plan: Plan, busy_s: float, top: int, height: int) -> list[Mark]:
    """The busy part, cut in proportion to what each layer takes on that device."""
    costs_s = layer_times_s(plan, share.device, share.start, share.stop)
    total_s = sum(costs_s)
    if total_s <= 0 or len(costs_s) > MAX_DRAWN_LAYERS or len(costs_s) < 2:
        tooltip = f"{share.label}: layers {share.start}–{share.stop}, {format_seconds(busy_s)} of a step"
        return [ChartBar(0, busy_s, top, height, "predicted", tooltip)]
    bars: list[Mark] = []
    borders: list[Mark] = []  # last, so that no layer covers one
    at_s = 0.0
    for layer, cost_s in zip(plan.problem.layers[share.start : share.stop], costs_s, strict=True):
        part_s = busy_s * cost_s / total_s
        tooltip = f"{layer.name} on {share.label}: {format_seconds(cost_s)} of a step"
        bars.append(ChartBar(at_s, part_s, top, height, "predicted", tooltip))
        if at_s:
            borders.append(VerticalLine(at_s, top, top + height, "cut"))
        at_s += part_s
    return [*bars, *borders]


def layer_times_s(plan: Plan, device: str, start: int, stop: int) -> list[float]:
    """Seconds a step of each of the layers [start, stop) on a device: all microbatches, and the optimizer."""
    problem = plan.problem
    times = problem.times.get(device)
    share = next(
        pipeline for pipeline in plan.pipelines if any(stage.device == device for stage in pipeline.stages)
    )
    steps = (share.local_steps or 1) / plan.steps_per_iteration
    recomputed = any(stage.recompute for stage in plan.placed_stages if stage.device == device)
    count = steps * share.microbatches
    if times is None:
        rate = next(candidate.flops_per_s for candidate in problem.devices if candidate.id == device)
        factor = 4 / 3 if recomputed else 1
        return [count * layer.flops / rate * factor for layer in problem.layers[start:stop]]
    parts = zip(times.forward_s, times.backward_s, times.optimizer_s, strict=True)
    whole = [count * (f * (2 if recomputed else 1) + b) + steps * o for f, b, o in parts]
    return whole[start:stop]


def _memory_texts(
    report: ComparisonReport, row: ComparisonRow, share: DeviceShare, plan: Plan
) -> tuple[str, ...]:
    """``121 MiB of 5.40 GiB``, and the most that was measured where that is known."""
    need = next(replica.memory_bytes for replica in plan.predicted.replicas if replica.device == share.device)
    have = next(device.memory_bytes for device in plan.problem.devices if device.id == share.device)
    planned = f"{format_bytes(need)} of {format_bytes(have) if have is not None else 'unlimited'}"
    done = report.outcome(row.strategy).measurement
    replicas = done.replicas if done is not None else ()
    peak = next((r.peak_memory_bytes for r in replicas if r.device == share.device), None)
    return (planned, f"{format_bytes(peak)} at most, measured") if peak else (planned,)


def prediction_chart(report: ComparisonReport) -> LaneChart:
    """A lane a step and a device's computing in it: a ring where it was predicted, a dot where it was."""
    groups = [(rows[0], name) for rows, name in report.groups() if rows[0].measured]
    values_s = [share.measured_compute_s or 0.0 for row, _ in groups for share in row.shares]
    values_s += [share.predicted_compute_s for row, _ in groups for share in row.shares]
    values_s += [row.measured.p90 for row, _ in groups if row.measured]
    values_s += [row.predicted_s or 0.0 for row, _ in groups]
    values_s += [row.predicted_interval.high_s for row, _ in groups if row.predicted_interval]
    axis = seconds_axis(max(values_s), "a step", 1.03)
    lanes: list[ChartLane] = []
    for row, name in groups:
        assert row.measured is not None
        took = row.measured
        spread = whisker(took.p10, took.p90, 11, 5, "whisker on")
        if row.predicted_interval is not None:
            spread += whisker(row.predicted_interval.low_s, row.predicted_interval.high_s, 11, 8)
        lanes.append(
            _prediction_lane(
                name,
                f"{name}, the step",
                row.predicted_s or 0.0,
                row.measured_s or 0.0,
                axis,
                spread,
                ": the step",
            )
        )
        for share in row.shares:
            if share.measured_compute_s is not None:
                what = f"{name}, {share.label}, computing"
                pair_s = share.predicted_compute_s, share.measured_compute_s
                lanes.append(_prediction_lane(share.label, what, *pair_s, axis))
    legend: tuple[LegendEntry, ...] = (
        LegendEntry("dot", "ring", "predicted"),
        LegendEntry("dot", "measured", "measured, median"),
        LegendEntry("line", "whisker on", "p10 to p90 of the steps"),
    )
    if any(row.predicted_interval for row, _ in groups):
        legend += (LegendEntry("line", "whisker", "the prediction's 80% interval"),)
    return LaneChart(
        "Steps, and each device's computing in them",
        axis,
        (LanePanel(tuple(lanes)),),
        summary=(TextPart("a dot in its ring is a prediction that held"),),
        legend=legend,
        lane_height=22,
    )


def _prediction_lane(
    name: str,
    what: str,
    predicted_s: float,
    measured_s: float,
    axis: ValueAxis,
    spread: tuple[Mark, ...] = (),
    suffix: str = "",
) -> ChartLane:
    tooltip = f"{what}: predicted {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}"
    marks = (
        HorizontalLine(0, axis.end, 11, "grid"),
        *spread,
        ChartDot(predicted_s, 11, 7, "ring", tooltip),
        ChartDot(measured_s, 11, 4, "measured", tooltip),
    )
    error = format_percent(predicted_s / measured_s - 1) if measured_s else UNKNOWN
    return ChartLane(
        name,
        marks,
        tooltip,
        value=format_seconds(measured_s),
        remark=f" · {error}",
        name_suffix=suffix,
        indented=not spread,
    )


def bound_chart(report: ComparisonReport) -> LaneChart | None:
    """A lane a plan: the bound, and what the plan takes more. None where no strategy claims a bound."""
    bounded = [row for row in report.planned if row.bound_s is not None]
    if not bounded:
        return None
    by_step = bounded[0].objective == "iteration"
    values_s = {row.strategy: report.plan(row.strategy).certificate.value_s for row in bounded}
    lanes = [
        _bound_lane(row, row.bound_s, values_s[row.strategy], name)
        for (row, *_), name in report.groups()
        if row.bound_s is not None
    ]
    return LaneChart(
        "Distance from the bound",
        seconds_axis(max(values_s.values()), "a step" if by_step else "a microbatch"),
        (LanePanel(tuple(lanes)),),
        summary=()
        if len({row.bound_s for row in bounded}) > 1
        else (
            TextPart(f"no {report.bounded_name} can take less than "),
            TextPart(format_seconds(bounded[0].bound_s), "strong"),
            TextPart("" if by_step else " a microbatch"),
        ),
        legend=(
            LegendEntry("swatch", "d-optimal", f"what no {report.bounded_name} can do without (the bound)"),
            LegendEntry("swatch", "hatched", "what this plan takes more"),
        ),
        lane_height=28,
    )


def _bound_lane(row: ComparisonRow, bound_s: float, value_s: float, name: str) -> ChartLane:
    marks: list[Mark] = [ChartBar(0, bound_s, 6, 16, "d-optimal", f"the bound: {format_seconds(bound_s)}")]
    if value_s > bound_s * (1 + 1e-9):
        tooltip = f"above the bound: {format_seconds(value_s - bound_s)}"
        marks.append(ChartBar(bound_s, value_s - bound_s, 6, 16, "hatched", tooltip))
    marks.append(VerticalLine(value_s, 2, 26, "end"))
    above = "at the bound" if row.proved else f"{format_percent(row.gap, sign=False)} above"
    label = f"{name}: {format_seconds(value_s)}, {above}"
    return ChartLane(name, tuple(marks), label, value=format_seconds(value_s), details=(above,))


def utilization_chart(report: ComparisonReport) -> LaneChart:
    """A lane a plan: which part of all devices' time is computing, predicted and measured."""
    axis = ValueAxis(100.0, 1.0, "%", "of the cluster's time")
    lanes = []
    for (row, *_), name in report.groups():
        count = len(report.plan(row.strategy).problem.devices)
        predicted, measured = utilization(row, count)
        marks: list[Mark] = [ChartBar(0, 100, 4, 20, "track")]
        if predicted is not None:
            height, tooltip = 12 if measured is not None else 20, f"{name}: {predicted:.0%} predicted"
            marks.append(ChartBar(0, 100 * predicted, 4, height, "predicted", tooltip))
        if measured is not None:
            marks.append(ChartBar(0, 100 * measured, 17, 7, "measured", f"{name}: {measured:.0%} measured"))
        shown = measured if measured is not None else predicted
        both = measured is not None and predicted is not None
        lanes.append(
            ChartLane(
                name,
                tuple(marks),
                name,
                notes=(f"{len(row.shares)} of {count} devices used",),
                value=f"{shown:.0%}" if shown is not None else UNKNOWN,
                remark=" busy",
                details=(f"predicted {predicted:.0%}",) if both else (),
            )
        )
    return LaneChart(
        "How busy the cluster is",
        axis,
        (LanePanel(tuple(lanes)),),
        summary=(TextPart("all devices, computing, over all their time"),),
        caption=(
            TextPart(
                "A slow device in a fast plan may wait: what counts is the step, not that all are busy."
            ),
        ),
        lane_height=28,
    )


def utilization(row: ComparisonRow, devices: int) -> tuple[float | None, float | None]:
    """Which part, 0 to 1, of ``devices`` devices' time is computing: predicted, measured."""
    predicted = measured = None
    if row.predicted_s and devices:
        predicted = sum(share.predicted_compute_s for share in row.shares) / (devices * row.predicted_s)
    parts_s = [share.measured_compute_s for share in row.shares]
    if row.measured_s and devices and None not in parts_s:
        measured = sum(part or 0.0 for part in parts_s) / (devices * row.measured_s)
    return (
        None if predicted is None else min(1.0, predicted),
        None if measured is None else min(1.0, measured),
    )


def _longest_s(report: ComparisonReport) -> float:
    """The longest time that an axis must hold on which all strategies are drawn."""
    ends_s = [row.predicted_s or 0.0 for row in report.planned]
    ends_s += [row.measured.p90 for row in report.planned if row.measured]
    ends_s += [row.predicted_interval.high_s for row in report.planned if row.predicted_interval]
    ends_s += [share.measured_compute_s or 0.0 for row in report.planned for share in row.shares]
    return max(ends_s, default=0.0)
