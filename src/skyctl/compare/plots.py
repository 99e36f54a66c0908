"""The comparison as two pictures: who works how long in a step, and how the loss falls."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from skyctl.compare import canvas
from skyctl.compare.canvas import FAINT, INK, MEASURED, MUTED, PREDICTED
from skyctl.compare.rows import Outcome, Row, Share
from skyctl.compare.words import seconds, times

_BAR_IN = 0.27
_HEAD_IN = 0.44
_NOTE_IN = 0.5
_TOP_IN = 0.36
_BOTTOM_IN = 0.5
_SPLIT_IN = 7.1
"""Where the devices' bars end and the steps' panel begins, from the left."""
_STEPS_IN = (1.9, 5.0)
"""The least and the most height of the steps' panel."""


def plot_comparison(compared: Sequence[Row], path: str | Path) -> Path:
    """Draws every strategy to one scale of time: a bar a device, its idle part hatched; steps at the right.

    Returns:
        The path written.

    Raises:
        SkyctlError: matplotlib is missing, there is nothing to draw, or the file can't be written.
    """
    longest_s = max(_ends_s(compared), default=0.0)
    labels = [share.label for row in compared for share in row.shares]
    names = canvas.device_names(labels)
    heights = [_height_in(row) for row in compared]
    left_in = 0.2 + 0.078 * max([len(name) for name in names.values()], default=5)
    with canvas.style():
        figure = canvas.figure(_TOP_IN + max(sum(heights), _STEPS_IN[0]) + _BOTTOM_IN)
        at_in = _TOP_IN
        for i, row in enumerate(compared):
            axes = canvas.place(figure, left_in, at_in, _SPLIT_IN - left_in, heights[i])
            _draw_row(axes, row, names, longest_s, last=i == len(compared) - 1)
            at_in += heights[i]
        _key(figure, left_in, measured=any(row.measured for row in compared))
        tall_in = min(max(sum(heights), _STEPS_IN[0]), _STEPS_IN[1])
        right_in = _SPLIT_IN + 0.45
        _draw_steps(
            canvas.place(figure, right_in, _TOP_IN, canvas.WIDTH_IN - right_in - 0.1, tall_in),
            compared,
            tall_in,
        )
        return canvas.save(figure, path)


def plot_losses(outcomes: Sequence[Outcome], path: str | Path) -> Path:
    """Draws the losses twice: by step (the same model, so the curves lie on each other) and by time.

    Returns:
        The path written.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    with canvas.style():
        figure = canvas.figure(3.6)
        grid = figure.add_gridspec(1, 2, left=0.065, right=0.985, top=0.86, bottom=0.145, wspace=0.08)
        by_step = figure.add_subplot(grid[0, 0])
        by_time = figure.add_subplot(grid[0, 1], sharey=by_step)
        runs = [(o.strategy, o.measurement) for o in outcomes if o.measurement is not None]
        for i, (strategy, run) in enumerate(runs):
            losses = [step.loss for step in run.steps]
            ends = list(accumulate(step.iteration_s for step in run.steps))
            # The first drawn is the widest, so that curves that lie on each other all show.
            look = {
                "color": canvas.strategy_colour(strategy, i),
                "linewidth": 1.6 + 2.2 * (len(runs) - 1 - i),
                "solid_capstyle": "round",
                "marker": "o" if len(losses) == 1 else "",
            }
            by_step.plot([step.step + 1 for step in run.steps], losses, label=strategy, **look)
            by_time.plot(ends, losses, **{**look, "linewidth": 2.0})
            by_time.plot(ends[-1:], losses[-1:], "o", color=look["color"], markersize=5)
        for axes, title, unit in ((by_step, "Loss by step", "step"), (by_time, "Loss by time", "seconds")):
            canvas.bare(axes, keep=("bottom",))
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
            axes.set_xlabel(unit)
            axes.grid(axis="y", color=FAINT, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(length=0)
        by_time.tick_params(labelleft=False)
        by_time.set_xlim(left=0)
        by_step.set_xlim(left=1 if any(len(run.steps) > 1 for _, run in runs) else None)
        if runs:
            by_step.legend(frameon=False, loc="upper right", handlelength=1.6)
        else:
            by_step.text(0.5, 0.5, "nothing was run", transform=by_step.transAxes, ha="center", color=MUTED)
        return canvas.save(figure, path)


def _ends_s(compared: Sequence[Row]) -> list[float]:
    """Every time that the common scale must hold."""
    ends = [row.predicted_s for row in compared if row.predicted_s is not None]
    ends += [row.measured.median for row in compared if row.measured]
    for row in compared:
        ends += [share.measured_compute_s or 0.0 for share in row.shares]
    return ends


def _height_in(row: Row) -> float:
    return _HEAD_IN + (_BAR_IN * len(row.shares) if row.shares else _NOTE_IN)


def _draw_row(axes: Any, row: Row, names: dict[str, str], longest_s: float, *, last: bool) -> None:
    """One strategy. y counts devices from the top; the head's text stands above the first."""
    count = len(row.shares)
    canvas.bare(axes, keep=("bottom",) if last else ())
    axes.set_xlim(0, (longest_s or 1.0) * 1.13)
    head = _HEAD_IN / _BAR_IN
    axes.set_ylim((count or _NOTE_IN / _BAR_IN) - 0.5, -0.5 - head)
    axes.set_yticks(range(count), [names[share.label] for share in row.shares])
    axes.tick_params(axis="y", length=0, pad=5)
    axes.tick_params(axis="x", length=3 if last else 0, labelbottom=last)
    if last:
        axes.set_xlabel("seconds of one step")
    axes.text(0, -0.68, row.strategy, fontsize=11, fontweight="bold", ha="left", va="bottom")
    if not count:
        why = f"{row.status}: {row.error}" if row.error else row.status
        note = textwrap.shorten(why, 220, placeholder=" …")
        axes.text(0, -0.4, textwrap.fill(note, 84), color=MUTED, ha="left", va="top", linespacing=1.4)
        return
    _note(axes, row, longest_s)
    for i, share in enumerate(row.shares):
        _draw_share(axes, i, share, row, longest_s)
    if row.predicted_s is not None:
        axes.plot([row.predicted_s] * 2, [-0.56, count - 0.44], color=INK, linewidth=1.4)
    if row.measured:
        median = row.measured.median
        axes.plot([median] * 2, [-0.56, count - 0.44], color=MEASURED, linewidth=1.4, linestyle=(0, (3, 1.6)))


def _note(axes: Any, row: Row, longest_s: float) -> None:
    """Beside the strategy's name: what does not fit, or who is left out."""
    if row.status == "infeasible" or row.error:
        text = f"{row.status}: {row.error}" if row.status == "infeasible" else str(row.error)
    elif row.unused:
        text = f"unused: {', '.join(row.unused)}"
    else:
        return
    start = (longest_s or 1.0) * 0.0145 * (len(row.strategy) + 2)
    axes.text(start, -0.68, canvas.shortened(text, 78), color=MUTED, fontsize=8.5, va="bottom")


def _draw_share(axes: Any, i: int, share: Share, row: Row, longest_s: float) -> None:
    """One device: busy as predicted, idle up to the step's end, busy as measured as a thin bar below."""
    thin = row.measured is not None and share.measured_compute_s is not None
    centre, thick = (i - 0.12, 0.54) if thin else (i, 0.68)
    step_s = row.predicted_s or 0.0
    busy_s = min(share.predicted_compute_s, step_s)
    axes.barh(
        centre, step_s - busy_s, left=busy_s, height=thick,
        facecolor="white", edgecolor=canvas.IDLE, hatch="////", linewidth=0,
    )  # fmt: skip
    axes.barh(centre, busy_s, height=thick, color=PREDICTED, linewidth=0)
    if thin:
        axes.barh(i + 0.27, share.measured_compute_s, height=0.16, color=MEASURED, linewidth=0)
    count = share.stop - share.start
    label = f"{count} layer" if count == 1 else f"{count} layers"
    inside = busy_s > 0.013 * (longest_s or 1.0) * (len(label) + 1)
    if inside:
        axes.text(0.008 * longest_s, centre + 0.03, label, va="center", fontsize=8.5)
    else:
        at_s = max(busy_s, 0.0) + 0.008 * longest_s
        room = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.text(at_s, centre + 0.03, label, va="center", fontsize=8.5, bbox=room)


def _key(figure: Any, left_in: float, *, measured: bool) -> None:
    """What the bars mean, in one line over them."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=PREDICTED, label="computing, as predicted"),
        Patch(facecolor="white", edgecolor=canvas.IDLE, hatch="//////", linewidth=0, label="idle"),
        Line2D([], [], color=INK, linewidth=1.4, label="end of step, predicted"),
    ]
    if measured:
        handles.insert(1, Patch(facecolor=MEASURED, label="as measured"))
        handles.append(
            Line2D([], [], color=MEASURED, linewidth=1.4, linestyle=(0, (3, 1.6)), label="measured")
        )
    wide, high = figure.get_size_inches()
    figure.legend(
        handles=handles, loc="upper left", ncols=len(handles), frameon=False, fontsize=8.5,
        bbox_to_anchor=(left_in / wide, 1 - 0.08 / high), handlelength=1.5, columnspacing=1.6,
        borderaxespad=0, borderpad=0,
    )  # fmt: skip


def _draw_steps(axes: Any, compared: Sequence[Row], height_in: float) -> None:
    """Step times side by side, predicted and measured, and how many times faster than even."""
    canvas.bare(axes, keep=("bottom",))
    rows = [row for row in compared if row.predicted_s is not None and row.status != "infeasible"]
    measured = any(row.measured for row in rows)
    tops: list[float] = []
    for i, row in enumerate(rows):
        bars = [(row.predicted_s or 0.0, PREDICTED)]
        if row.measured:
            bars.append((row.measured.median, MEASURED))
        wide = 0.4 if measured else 0.56
        offsets = [-wide / 2 - 0.01, wide / 2 + 0.01] if len(bars) == 2 else [0.0]
        for (height_s, colour), offset in zip(bars, offsets, strict=True):
            axes.bar(i + offset, height_s, width=wide, color=colour, linewidth=0)
        if row.measured:
            low, median, high = row.measured.p10, row.measured.median, row.measured.p90
            error = [[median - low], [high - median]]
            axes.errorbar(i + offsets[-1], median, yerr=error, color=INK, linewidth=1, capsize=2.5)
        reach_s = max(height for height, _ in bars)
        reach_s = max(reach_s, row.measured.p90) if row.measured else reach_s
        tops.append(reach_s)
        speedup = row.measured_speedup if row.measured else row.predicted_speedup
        _over(axes, i, reach_s, times(speedup) if speedup else "", seconds(_shown_s(row)))
    # As high as the first strategy's name.
    axes.text(
        0,
        1 - (_HEAD_IN - 0.085) / height_in,
        "step time",
        transform=axes.transAxes,
        fontsize=11,
        fontweight="bold",
    )
    names = [canvas.shortened(row.strategy, 12) for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=9.5 if len(rows) < 5 else 7.5)
    axes.tick_params(axis="x", length=0, labelcolor=INK)
    axes.set_yticks([])
    axes.set_ylim(0, (max(tops, default=0.0) or 1.0) / (1 - (_HEAD_IN + 0.5) / height_in))
    axes.set_xlim(-0.5, max(len(rows), 3) - 0.5)


def _shown_s(row: Row) -> float | None:
    return row.measured.median if row.measured else row.predicted_s


def _over(axes: Any, x: float, y: float, bold: str, small: str) -> None:
    """A speed-up over a step time, above a bar."""
    offset = (0, 3)
    axes.annotate(small, (x, y), offset, textcoords="offset points", ha="center", color=MUTED, fontsize=8.5)
    if bold:
        axes.annotate(
            bold, (x, y), (0, 15), textcoords="offset points", ha="center", fontsize=11, fontweight="bold"
        )
