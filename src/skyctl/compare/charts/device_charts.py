"""Charts of the cluster as it was measured: devices' speeds, and the links between nodes."""

from __future__ import annotations

from skyctl.compare.charts.chart import (
    ChartBar,
    ChartLane,
    LaneChart,
    LanePanel,
    Mark,
    TextPart,
    ValueAxis,
    whisker,
)
from skyctl.compare.number_format import format_bytes, format_figure
from skyctl.compare.report_data import ComparisonReport, DeviceSpeed


def device_speed_chart(report: ComparisonReport) -> LaneChart:
    """A lane a device: the samples a second that it would train alone, with the spread of its timings."""
    rates = [device.samples_per_s or 0.0 for device in report.devices]
    fastest = max(rates, default=0.0)
    reach = max((_upper_rate(device) for device in report.devices), default=fastest)
    caption = "Memory is what a stage may use."
    if any(device.spread for device in report.devices):
        caption += " The whisker is the spread of the repeated timings: the middle 80% of them lie within it."
    running = [rate for rate in rates if rate > 0]
    ratio = f"the fastest is {format_figure(fastest / min(running))}× the slowest" if len(running) > 1 else ""
    return LaneChart(
        "Speed on this workload",
        ValueAxis(max(fastest, reach) * 1.02 or 1.0, caption="samples/s, alone"),
        (LanePanel(tuple(_device_lane(device, fastest) for device in report.devices)),),
        summary=(TextPart(ratio),) if ratio else (),
        notes=tuple(report.notes),
        caption=(TextPart(caption),),
        lane_height=28,
    )


def _upper_rate(device: DeviceSpeed) -> float:
    return (device.samples_per_s or 0.0) * (1 + (device.spread or 0.0) / 2)


def _device_lane(device: DeviceSpeed, fastest: float) -> ChartLane:
    rate = device.samples_per_s
    marks: list[Mark] = []
    if rate:
        tooltip = f"{device.label}: {format_figure(rate)} samples/s alone"
        tooltip += f", spread {device.spread:.0%}" if device.spread is not None else ""
        marks.append(ChartBar(0, rate, 6, 16, "predicted", tooltip))
        if device.spread:
            low, high = max(0.0, rate * (1 - device.spread / 2)), _upper_rate(device)
            marks += whisker(low, high, 14, 4)
    share = (f"{rate / fastest:.0%} of the fastest",) if rate and fastest else ()
    return ChartLane(
        device.label,
        tuple(marks),
        f"{device.label}: {format_figure(rate)} samples/s",
        notes=(device.hardware, *device.notes) if device.hardware or device.notes else (),
        value=format_figure(rate) if rate else "",
        remark=" samples/s" if rate else "not known",
        details=(*share, format_bytes(device.memory_bytes)),
    )
