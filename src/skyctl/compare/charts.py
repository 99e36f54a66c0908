"""The report's other plots as pictures: devices' speeds, predicted against measured, the bound, sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skyctl.compare import canvas
from skyctl.compare.canvas import FAINT, INK, MEASURED, MUTED, PREDICTED
from skyctl.compare.report.facts import Machine
from skyctl.compare.rows import Row
from skyctl.compare.sweeps import Sweep
from skyctl.compare.words import percent, seconds

_ROW_IN = 0.34
_SMALL_ROW_IN = 0.16
_TOP_IN = 0.62
_BOTTOM_IN = 0.5
_MOST_IN = 12.0

Draw = Callable[[Any], None]


def plot_machines(machines: Sequence[Machine], path: str | Path) -> Path:
    """Draws how many samples a second each device would train alone, with the spread of its timings.

    Returns:
        The path written.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    rates = [machine.samples_per_s or 0.0 for machine in machines]

    def draw(axes: Any) -> None:
        axes.barh(range(len(rates)), rates, height=0.62, color=PREDICTED, linewidth=0)
        for i, (machine, rate) in enumerate(zip(machines, rates, strict=True)):
            half = rate * (machine.spread or 0.0) / 2
            if half:
                axes.errorbar(rate, i, xerr=half, color=INK, linewidth=1, capsize=2.5)
            axes.text(rate + half, i, f"  {rate:.3g}", va="center", fontsize=8.5, color=MUTED)
        axes.set_xlim(0, max(rates, default=1.0) * 1.2 or 1.0)

    names = [machine.label for machine in machines]
    return _bars(names, "Speed on this workload", "samples/s, the whole model alone", draw, path)


def plot_bound(compared: Sequence[Row], path: str | Path) -> Path:
    """Draws each plan's step and the bound below which none can be.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    rows = [row for row in compared if row.bound_s is not None and row.gap is not None]

    def draw(axes: Any) -> None:
        for i, row in enumerate(rows):
            bound_s = row.bound_s or 0.0
            value_s = bound_s * (1 + (row.gap or 0.0))
            axes.barh(i, bound_s, height=0.62, color=canvas.STRATEGIES["optimal"], linewidth=0)
            axes.barh(
                i, value_s - bound_s, left=bound_s, height=0.62,
                facecolor="white", edgecolor=canvas.IDLE, hatch="////", linewidth=0,
            )  # fmt: skip
            axes.plot([value_s] * 2, [i - 0.38, i + 0.38], color=INK, linewidth=1.4)
            above = "at the bound" if (row.gap or 0.0) <= 1e-9 else f"{percent(row.gap, sign=False)} above"
            axes.text(value_s, i, f"  {seconds(value_s)}, {above}", va="center", fontsize=8.5, color=MUTED)
        longest_s = max(((row.bound_s or 0.0) * (1 + (row.gap or 0.0)) for row in rows), default=1.0)
        axes.set_xlim(0, (longest_s or 1.0) * 1.3)

    names = [row.strategy for row in rows]
    return _bars(names, "Distance from the bound", "seconds; green: what no plan can do without", draw, path)


def plot_prediction(compared: Sequence[Row], path: str | Path) -> Path:
    """Draws a ring where each step, and each device's computing in it, was predicted, a dot where it was.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    lines: list[tuple[str, float, float, tuple[float, float] | None]] = []
    for row in compared:
        if row.measured is None or row.predicted_s is None:
            continue
        took = row.measured
        lines.append((f"{row.strategy}: the step", row.predicted_s, took.median, (took.p10, took.p90)))
        lines += [
            (share.label, share.predicted_compute_s, share.measured_compute_s, None)
            for share in row.shares
            if share.measured_compute_s is not None
        ]

    def draw(axes: Any) -> None:
        for i, (_, said_s, did_s, spread) in enumerate(lines):
            axes.axhline(i, color=FAINT, linewidth=0.8, zorder=0)
            if spread is not None:
                error = [[max(0.0, did_s - spread[0])], [max(0.0, spread[1] - did_s)]]
                axes.errorbar(did_s, i, xerr=error, color=MEASURED, linewidth=1.4, capsize=3)
            axes.plot(said_s, i, "o", markersize=9, markerfacecolor="white", markeredgecolor=PREDICTED,
                      markeredgewidth=2, label="predicted" if not i else None)  # fmt: skip
            axes.plot(did_s, i, "o", markersize=4.5, color=MEASURED, label="measured" if not i else None)
        axes.set_xlim(left=0)
        if lines:
            axes.legend(frameon=False, loc="lower right", ncols=2, bbox_to_anchor=(1, 1), fontsize=8.5)

    names = [name for name, *_ in lines]
    return _bars(names, "Predicted and measured", "seconds of a step", draw, path)


def plot_sweep(sweep: Sweep, path: str | Path) -> Path:
    """Draws the step over what was varied: hollow is predicted, full is measured.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    with canvas.style():
        figure = canvas.figure(4.0)
        axes = figure.add_axes((0.07, 0.14, 0.91, 0.72))
        canvas.bare(axes, keep=("bottom",))
        strategies = sweep.strategies
        for i, strategy in enumerate(strategies):
            colour = canvas.strategy_colour(strategy, i)
            said, did = sweep.line(strategy), sweep.line(strategy, measured=True)
            axes.plot(
                [x for x, _ in said], [y for _, y in said], "-o", color=colour, label=strategy, markersize=6,
                markerfacecolor="white", markeredgewidth=1.6, linewidth=1.6 + 1.6 * (len(strategies) - 1 - i),
            )  # fmt: skip
            axes.plot([x for x, _ in did], [y for _, y in did], "o", color=colour, markersize=7)
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(len(sweep.points)), [str(one.value) for one in sweep.points])
        axes.set_xlabel(sweep.kind)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.set_title(f"Seconds a step, by {sweep.kind}", loc="left", fontsize=11, fontweight="bold")
        axes.legend(frameon=False, loc="lower right", ncols=len(strategies) or 1, bbox_to_anchor=(1, 1))
        return canvas.save(figure, path)


def _bars(names: Sequence[str], title: str, unit: str, draw: Draw, path: str | Path) -> Path:
    """A row a name, from the top; ``draw`` fills them in."""
    count = max(1, len(names))
    row_in = max(_SMALL_ROW_IN, min(_ROW_IN, _MOST_IN / count))
    called = canvas.device_names(list(names), 28)
    left_in = 0.25 + 0.078 * max((len(name) for name in called.values()), default=1)
    with canvas.style():
        figure = canvas.figure(_TOP_IN + count * row_in + _BOTTOM_IN)
        axes = canvas.place(figure, left_in, _TOP_IN, canvas.WIDTH_IN - left_in - 0.2, count * row_in)
        canvas.bare(axes, keep=("bottom",))
        axes.set_ylim(count - 0.5, -0.5)
        size = min(9.5, 40 * row_in)
        axes.set_yticks(range(len(names)), [called[name] for name in names], fontsize=size)
        axes.tick_params(axis="y", length=0, pad=5)
        axes.set_xlabel(unit)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=10)
        draw(axes)
        return canvas.save(figure, path)
