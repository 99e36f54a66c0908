"""A step as a picture: every stage's bars over time, measured above simulated, to one scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skyctl.compare import canvas
from skyctl.compare.canvas import INK, MUTED
from skyctl.compare.timeline import IDLE, TRANSFER, Bar, Timeline
from skyctl.compare.words import percent, seconds

_LOOKS: dict[str, tuple[str, str, str]] = {
    "F": ("forward", "#0072B2", "white"),
    "B": ("backward", "#E69F00", INK),
    "W": ("weight gradients", "#009E73", "white"),
    "O": ("optimizer", "#CC79A7", INK),
    "C": ("clipping", "#882255", "white"),
    "S": ("sending", "#B0B0B0", INK),
    TRANSFER: ("waiting for the network", "#F0E442", INK),
    IDLE: ("waiting for another stage", "#F1F1F1", MUTED),
}
"""By kind: its name, its colour, that of the number on it. All told apart by colour-blind eyes."""

_ROWS_IN = 7.0
"""So high are all of a panel's rows together at most."""
_ROW_IN = (0.09, 0.3)
_HEAD_IN = 0.36
_TOP_IN = 0.34
_BOTTOM_IN = 0.48
_SHORTEST = 1e-4
"""Of the step: shorter bars are not drawn."""


def plot_trace(measured: Timeline, simulated: Timeline, path: str | Path) -> Path:
    """Draws a typical measured step above the simulated one.

    Returns:
        The path written.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    typical, step = measured.typical(), simulated.steps[0]
    longest_s = max(typical.seconds, step.seconds, 1e-9)
    off = percent(typical.seconds / step.seconds - 1) if step.seconds else ""
    panels = [
        (f"measured (step {typical.number + 1})", seconds(typical.seconds), off, measured.within(typical)),
        ("simulated", seconds(step.seconds), "", list(step.bars)),
    ]
    ends = [typical.seconds, step.seconds]
    drawn = [
        _Panel(
            title,
            f"{took} a step{f', {note} against the simulated' if note else ''}",
            bars,
            end_s,
            measured.devices,
        )
        for (title, took, note, bars), end_s in zip(panels, ends, strict=True)
    ]
    return _draw(drawn, longest_s, path)


def plot_steps(lines: Sequence[tuple[str, Timeline]], path: str | Path) -> Path:
    """Draws the simulated step of each strategy, (its name, its timeline), to one scale.

    Returns:
        The path written.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    panels = []
    for name, line in lines:
        step = line.steps[0]
        panels.append(
            _Panel(name, f"{seconds(step.seconds)} a step, simulated", step.bars, step.seconds, line.devices)
        )
    return _draw(panels, max([panel.end_s for panel in panels] + [1e-9]), path)


class _Panel(NamedTuple):
    """One step: what stands over it at the left and the right, its bars, its end, its rows."""

    title: str
    figures: str
    bars: Sequence[Bar]
    end_s: float
    devices: Sequence[str]


def _draw(panels: Sequence[_Panel], longest_s: float, path: str | Path) -> Path:
    """All panels below each other."""
    names = canvas.device_names(list(dict.fromkeys(d for panel in panels for d in panel.devices)))
    rows = sum(len(panel.devices) for panel in panels)
    row_in = min(_ROW_IN[1], max(_ROW_IN[0], len(panels) * _ROWS_IN / max(1, rows)))
    left_in = 0.2 + 0.078 * max((len(name) for name in names.values()), default=1)
    width_in = canvas.WIDTH_IN - left_in - 0.2
    with canvas.style():
        figure = canvas.figure(_TOP_IN + len(panels) * _HEAD_IN + rows * row_in + _BOTTOM_IN)
        top_in = _TOP_IN
        for i, panel in enumerate(panels):
            high_in = len(panel.devices) * row_in
            axes = canvas.place(figure, left_in, top_in + _HEAD_IN, width_in, high_in)
            top_in += _HEAD_IN + high_in
            labels = [names[device] for device in panel.devices]
            _frame(axes, labels, longest_s, row_in, last=i == len(panels) - 1)
            _head(axes, panel.title, panel.figures, row_in)
            _bars(axes, panel.bars, longest_s, width_in, row_in)
            ends = [-0.5, len(panel.devices) - 0.5]
            axes.plot([panel.end_s] * 2, ends, color=INK, linewidth=1.2, clip_on=False)
        drawn = {bar.kind for panel in panels for bar in panel.bars if bar.seconds > longest_s * _SHORTEST}
        _key(figure, left_in, drawn)
        return canvas.save(figure, path)


def _frame(axes: Any, names: Sequence[str], longest_s: float, row_in: float, *, last: bool) -> None:
    canvas.bare(axes, keep=("bottom",) if last else ())
    axes.set_xlim(0, longest_s * 1.002)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=min(9.5, 40 * row_in))
    axes.tick_params(axis="y", length=0, pad=5)
    axes.tick_params(axis="x", length=3 if last else 0, labelbottom=last)
    if last:
        axes.set_xlabel("seconds from the step's start on the first stage")


def _head(axes: Any, title: str, figures: str, row_in: float) -> None:
    at = -0.5 - 0.09 / row_in
    axes.text(0, at, title, fontsize=11, fontweight="bold", ha="left", va="bottom")
    axes.text(1.0, at, figures, transform=axes.get_yaxis_transform(), color=MUTED, ha="right", va="bottom")


def _bars(axes: Any, bars: Sequence[Bar], longest_s: float, width_in: float, row_in: float) -> None:
    """One collection a kind; a microbatch's number where it has room."""
    size = min(7.5, 45 * row_in)
    digit_s = longest_s / width_in * size * 0.64 / 72  # a digit's width in points is 0.64 of the size
    for kind, (_, colour, ink) in _LOOKS.items():
        shown = [bar for bar in bars if bar.kind == kind and bar.seconds > longest_s * _SHORTEST]
        waiting = kind in (IDLE, TRANSFER)
        high = 0.36 if waiting else 0.82
        for row in sorted({bar.row for bar in shown}):
            axes.broken_barh(
                [(bar.start_s, bar.seconds) for bar in shown if bar.row == row],
                (row - high / 2, high),
                facecolors=colour, edgecolors="none" if waiting else "white", linewidth=0.3,
            )  # fmt: skip
        if kind not in ("F", "B", "W") or size < 4:
            continue
        for bar in shown:
            text = str(bar.microbatch)
            if bar.seconds > digit_s * (len(text) + 0.4):
                middle_s = (bar.start_s + bar.end_s) / 2
                axes.text(middle_s, bar.row + 0.03, text, fontsize=size, color=ink, ha="center", va="center")


def _key(figure: Any, left_in: float, drawn: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=look[1], label=look[0]) for kind, look in _LOOKS.items() if kind in drawn]
    wide, high = figure.get_size_inches()
    figure.legend(
        handles=handles, loc="upper left", ncols=max(1, len(handles)), frameon=False, fontsize=8.5,
        bbox_to_anchor=(left_in / wide, 1 - 0.08 / high), handlelength=1.3, columnspacing=1.4,
        borderaxespad=0, borderpad=0,
    )  # fmt: skip
