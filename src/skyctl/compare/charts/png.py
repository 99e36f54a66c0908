"""Charts as PNG files, drawn by matplotlib in the colours that ``charts.css`` has for light screens."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from skyctl.compare.charts import matplotlib_canvas as canvas
from skyctl.compare.charts.chart import (
    Chart,
    ChartBar,
    ChartCurve,
    ChartDot,
    ChartGroup,
    ChartLane,
    HorizontalLine,
    LaneChart,
    LegendEntry,
    LineChart,
    Mark,
    MatrixChart,
    TextPart,
    VerticalLine,
)
from skyctl.compare.charts.network_chart import NetworkChart, NetworkLine

STYLE = Path(__file__).parents[1] / "templates" / "charts.css"
# All lengths are in pixels of a page that is 1000 pixels wide, counted from its upper left corner.
WIDTH = 1000.0
MARGIN = 20.0
COLUMN_GAP = 18.0
LANE_GAP, DENSE_GAP = 8.0, 2.0
CURVES_HEIGHT = 260.0
MAX_CELL_WIDTH, CELL_HEIGHT = 100.0, 56.0
MAP_COLUMNS = 3
"""So many maps fit beside each other; one alone is as large as each of them."""
MAX_LANES_HEIGHT = 3000.0
"""A chart with more lanes than fit in this has thinner ones."""
MAX_NOTE = 34
"""Characters of a lane's small note."""
SMALL = 8.0
"""Points of small text."""
DASHES: dict[str, Any] = {"bound": (0, (1.5, 2)), "end seen": (0, (3, 2)), "way-down": (0, (3, 2))}

HOLLOW = ("ring", "holder", "helper", "left-out")
"""The looks of circles that are not filled."""


@cache
def colours() -> dict[str, str]:
    """By look its colour, such as ``predicted`` → ``#56b4e9``; where there are two, that of its outline."""
    style = STYLE.read_text(encoding="utf-8")
    variables = dict(re.findall(r"--([\w-]+):(#\w+)", style.partition("}")[0]))
    found = dict(variables)
    for selector, declared in re.findall(r"\.([\w.-]+)\{([^}]*)\}", style):
        used = dict(re.findall(r"(fill|stroke):var\(--([\w-]+)\)", declared))
        if used:
            found[selector.replace(".", " ")] = variables[used.get("stroke") or used["fill"]]
    return found


def write_png(path: str | Path, *groups: ChartGroup) -> Path:
    """Draws the groups below each other.

    Returns:
        The path written.

    Raises:
        SkyctlError: matplotlib is missing, or the file can't be written.
    """
    with canvas.style():
        page = _Page()
        for group in groups:
            page.draw_legend(group.legend, MARGIN)
            for row in group.rows:
                page.draw_row(row)
            for note in group.notes:
                page.write_lines(MARGIN, note)
        return canvas.save(page.finish(), path)


class _Page:
    """One set of axes over the whole picture, in pixels. ``y``: how far down it is drawn."""

    def __init__(self) -> None:
        self.figure = canvas.figure(1.0)
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.y = MARGIN

    def finish(self) -> Any:
        """The figure, as high as what was drawn on it."""
        height = self.y + MARGIN / 2
        self.figure.set_size_inches(canvas.WIDTH_IN, height * canvas.WIDTH_IN / WIDTH)
        self.axes.set_xlim(0, WIDTH)
        self.axes.set_ylim(height, 0)
        return self.figure

    def write(self, x: float, y: float, text: str, **look: Any) -> Any:
        """Text whose middle is at that height, of 9.5 points and dark unless told otherwise."""
        return self.axes.text(x, y, text, **{"va": "center_baseline", "color": colours()["ink"], **look})

    def width_of(self, text: Any) -> float:
        """How many pixels a text takes that was written."""
        width = text.get_window_extent(self.figure.canvas.get_renderer()).width
        return float(width) * WIDTH / canvas.WIDTH_IN / canvas.DOTS_PER_INCH

    def write_parts(self, x: float, y: float, parts: Sequence[TextPart]) -> None:
        """A line of small text, its strong parts bold and dark."""
        for part in parts:
            weight = "bold" if part.style == "strong" else "normal"
            ink = colours()["ink" if part.style == "strong" else "muted"]
            x += self.width_of(self.write(x, y, part.text, fontsize=SMALL, weight=weight, color=ink))

    def write_lines(self, x: float, text: str) -> None:
        """A paragraph in small muted text below what is drawn so far."""
        for line in textwrap.wrap(text, 150):
            self.write(x, self.y + 8, line, **_muted())
            self.y += 16

    def draw_legend(self, entries: Sequence[LegendEntry], x: float) -> None:
        """All entries in a line, in another one where the first is full."""
        if not entries:
            return
        left, y = x, self.y + 8
        for entry in entries:
            if x > left and x + 40 + 6.2 * len(entry.text) > WIDTH - MARGIN:
                x, y = left, y + 18
            mark: Mark
            if entry.shape == "swatch":
                mark = ChartBar(0, 20, -5, 10, entry.look)
            elif entry.shape == "upright":
                mark = VerticalLine(10, -6, 6, entry.look)
            elif entry.shape == "line":
                mark = HorizontalLine(0, 20, 0, entry.look)
            else:
                mark = ChartDot(10, 0, 5, entry.look)
            self._draw_mark(mark, _Frame(x, y))
            text = self.write(x + 27, y, entry.text, **_muted())
            x += 27 + self.width_of(text) + 18
        self.y = y + 18

    def draw_row(self, charts: Sequence[Chart]) -> None:
        """Charts side by side, each under its title."""
        columns = max(len(charts), MAP_COLUMNS if isinstance(charts[0], NetworkChart) else 1)
        width = (WIDTH - 2 * MARGIN - 2 * COLUMN_GAP * (columns - 1)) / columns
        top, bottom = self.y, self.y
        for i, chart in enumerate(charts):
            self.y, x = top, MARGIN + i * (width + 2 * COLUMN_GAP)
            self.write(x, self.y + 12, canvas.shortened(chart.title, 60), fontsize=11, weight="bold")
            self.y += 28
            if isinstance(chart, LaneChart):
                self._draw_lane_chart(chart, x, width)
            elif isinstance(chart, LineChart):
                self._draw_line_chart(chart, x, width)
            elif isinstance(chart, NetworkChart):
                self._draw_network(chart, x, width)
            else:
                self._draw_matrix(chart, x, width)
            bottom = max(bottom, self.y)
        self.y = bottom + 10

    def _draw_lane_chart(self, chart: LaneChart, x: float, width: float) -> None:
        summary = "".join(part.text for part in chart.summary)
        self.write(x + width, self.y - 16, summary, ha="right", **_muted())
        self.draw_legend(chart.legend, x)
        lanes = [lane for panel in chart.panels for lane in panel.lanes]
        names = canvas.device_names([lane.name for lane in lanes], 28)
        shown = [names[lane.name] + lane.name_suffix for lane in lanes]
        notes = [canvas.shortened(note, MAX_NOTE) for lane in lanes for note in lane.notes[:1]]
        name_width = max(_text_width(shown, 6.6 if chart.dense else 7.2), _text_width(notes, 5.2))
        figures = [lane.value + lane.remark for lane in lanes]
        details = [detail for lane in lanes for detail in lane.details[:1]]
        left = x + name_width + COLUMN_GAP
        right = x + width - COLUMN_GAP - max(_text_width(figures, 6.6), _text_width(details, 5.4))
        step = chart.lane_height + (0 if chart.lane_height < 12 else DENSE_GAP if chart.dense else LANE_GAP)
        lane_scale = min(1.0, MAX_LANES_HEIGHT / max(1, step * len(lanes)))
        for panel in chart.panels:
            if panel.heading:
                self.write_parts(x, self.y + 8, panel.heading)
                self.y += 22
            for lane in panel.lanes:
                frame = _Frame(left, self.y, (right - left) / (chart.axis.end or 1.0), lane_scale)
                self._draw_marks(lane.marks, frame, chart)
                name = names[lane.name] + lane.name_suffix
                self._write_lane(lane, name, chart, x, x + width, lane_scale)
                self.y += step * lane_scale
        self._draw_axis(chart, left, right)
        for text in (*chart.notes, "".join(part.text for part in chart.caption)):
            self.write_lines(x, text)

    def _write_lane(
        self, lane: ChartLane, name: str, chart: LaneChart, x: float, end: float, lane_scale: float
    ) -> None:
        """A lane's name from ``x`` on, its figures up to ``end``; small lines only where they have room."""
        height = chart.lane_height * lane_scale
        middle, size = self.y + height / 2, max(1.0, min(9.0, 0.55 * height))
        small = height > 24
        note, detail = lane.notes[: int(small)], lane.details[: int(small)]
        weight = "normal" if chart.dense or lane.indented else "bold"
        self.write(x + 12 * lane.indented, middle - 7 * len(note), name, fontsize=size, weight=weight)
        self.write(end, middle - 7 * len(detail), lane.value + lane.remark, fontsize=size, ha="right")
        for text in note:
            self.write(x, middle + 8, canvas.shortened(text, MAX_NOTE), **_muted(SMALL - 1))
        for text in detail:
            self.write(end, middle + 8, text, ha="right", **_muted(SMALL - 1))

    def _draw_marks(self, marks: Sequence[Mark], frame: _Frame, chart: LaneChart) -> None:
        """Grid lines, then bars, those of one look together as there may be thousands; then other marks."""
        for value, _ in () if chart.dense else chart.axis.ticks()[1:]:
            self._draw_mark(VerticalLine(value, 0, chart.lane_height, "grid"), frame)
        bars: dict[tuple[float, float, str], list[tuple[float, float]]] = {}
        for mark in marks:
            if isinstance(mark, ChartBar):
                span = (frame.x(mark.start), max(0.4, mark.length * frame.per_unit))
                bars.setdefault((mark.top, mark.height, mark.look), []).append(span)
            else:
                self._draw_mark(mark, frame)
        for (top, height, look), spans in bars.items():
            place = (frame.y(top), height * frame.lane_scale)
            self.axes.broken_barh(spans, place, **_bar_look(look, outlined=chart.dense))

    def _draw_mark(self, mark: Mark, frame: _Frame) -> None:
        if isinstance(mark, ChartBar):
            place = (frame.y(mark.top), mark.height * frame.lane_scale)
            spans = [(frame.x(mark.start), mark.length * frame.per_unit)]
            self.axes.broken_barh(spans, place, **_bar_look(mark.look, outlined=False))
            return
        colour = colours()[mark.look]
        # Grid lines are under the bars, other lines over them.
        line = {"color": colour, "linewidth": 1.2, "zorder": 0.5 if mark.look == "grid" else 2}
        if isinstance(mark, VerticalLine):
            ends = [frame.y(mark.top), frame.y(mark.bottom)]
            self.axes.plot([frame.x(mark.at)] * 2, ends, linestyle=DASHES.get(mark.look, "-"), **line)
        elif isinstance(mark, HorizontalLine):
            ends = [frame.x(mark.start), frame.x(mark.end)]
            self.axes.plot(ends, [frame.y(mark.y)] * 2, linestyle=DASHES.get(mark.look, "-"), **line)
        elif isinstance(mark, ChartDot):
            fill = colours()["paper"] if mark.look in HOLLOW else colour
            look = {"markersize": 1.5 * mark.radius, "markerfacecolor": fill, "markeredgecolor": colour}
            self.axes.plot([frame.x(mark.at)], [frame.y(mark.y)], "o", markeredgewidth=1.6, **look)
        else:
            at = frame.x(mark.at), frame.y(mark.y - 4)
            self.write(*at, mark.text, ha="center", fontsize=7, color=colour)

    def _draw_axis(self, chart: LaneChart, left: float, right: float) -> None:
        for value, text in chart.axis.ticks():
            x = left + (right - left) * chart.axis.percent(value) / 100
            self._draw_mark(VerticalLine(0, 0, 5, "idle"), _Frame(x, self.y))
            self.write(x, self.y + 14, text, ha="center", **_muted())
        self.write(right, self.y + 30, chart.axis.label, ha="right", **_muted())
        self.y += 42

    def _draw_line_chart(self, chart: LineChart, x: float, width: float) -> None:
        self.write(x, self.y + 2, chart.y_unit, **_muted())
        left, right, top = x + 46, x + width - 8, self.y + 18
        for value, text in chart.y_ticks:
            y = top + CURVES_HEIGHT * chart.y_percent(value) / 100
            self._draw_mark(HorizontalLine(0, right - left, 0, "grid"), _Frame(left, y))
            self.write(left - 10, y, text, ha="right", **_muted())
        for curve in sorted(chart.curves, key=lambda one: -one.width):
            self._draw_curve(chart, curve, left, right - left, top)
        for value, text in chart.x_ticks:
            at = left + (right - left) * chart.x_percent(value) / 100
            self.write(at, top + CURVES_HEIGHT + 14, text, ha="center", **_muted())
        self.write(right, top + CURVES_HEIGHT + 30, chart.x_unit, ha="right", **_muted())
        self.y = top + CURVES_HEIGHT + 42

    def _draw_curve(self, chart: LineChart, curve: ChartCurve, left: float, width: float, top: float) -> None:
        def place(points: Sequence[Any]) -> tuple[list[float], list[float]]:
            xs = [left + width * chart.x_percent(point.x) / 100 for point in points]
            ys = [top + CURVES_HEIGHT * chart.y_percent(point.y * chart.y_factor) / 100 for point in points]
            return xs, ys

        colour = colours()[f"s-{curve.look}"]
        if curve.joined:
            line = {"linewidth": 0.72 * curve.width, "linestyle": (0, (4, 2)) if curve.dashed else "-"}
            self.axes.plot(*place(curve.points), color=colour, solid_capstyle="round", **line)
        fill = colour if curve.dots == "filled" else colours()["paper"]
        self.axes.plot(
            *place(curve.dotted), "o", color=colour, markerfacecolor=fill, markersize=5.8, markeredgewidth=1.5
        )

    def _draw_matrix(self, chart: MatrixChart, x: float, width: float) -> None:
        self.write_lines(x, chart.key)
        count = max(1, len(chart.names))
        names = canvas.device_names(chart.names, 12)
        left = x + max(40.0, _text_width(list(names.values()), 7.2)) + 10
        wide = min(MAX_CELL_WIDTH, (x + width - left) / count)
        high, size = min(wide, CELL_HEIGHT), max(4.0, min(9.0, 0.145 * wide))
        turned = {"rotation": 60, "va": "bottom"} if wide < 50 else {}
        self.y += 80 if turned else 26
        for i, name in enumerate(chart.names):
            y = self.y - (4 if turned else 10)
            self.write(
                left + (i + 0.5) * wide, y, names[name], ha="center", fontsize=max(6.0, size), **turned
            )
        for name, row in zip(chart.names, chart.cells, strict=True):
            self.write(left - 10, self.y + high / 2, names[name], ha="right", fontsize=max(6.0, size))
            for i, cell in enumerate(row):
                middle = left + (i + 0.5) * wide, self.y + high / 2
                if cell is not None and cell.fill is not None:
                    fill = tuple(part / 255 for part in cell.fill)
                    spans = [(left + i * wide, wide)]
                    self.axes.broken_barh(spans, (self.y, high), facecolors=[fill], edgecolors="white")
                text, ink = ("\n".join(cell.lines), cell.ink) if cell is not None else ("·", "black")
                self.axes.text(*middle, text, ha="center", va="center", fontsize=size, color=ink)
            self.y += high
        self.y += 10

    def _draw_network(self, chart: NetworkChart, x: float, width: float) -> None:
        frame = _Frame(x, self.y, width / chart.width, width / chart.width)
        for line in chart.lines:
            self._draw_network_line(line, frame)
        for node in chart.nodes:
            colour = colours()[node.look]
            fill = colours()["paper"] if node.look in HOLLOW else colour
            look = {"markersize": 1.44 * node.radius, "markerfacecolor": fill, "markeredgecolor": colour}
            self.axes.plot([frame.x(node.x)], [frame.y(node.y)], "o", markeredgewidth=1.4, zorder=3, **look)
        for text in chart.texts:
            backing = {"facecolor": colours()["paper"], "edgecolor": "none", "pad": 0.8}
            self.write(
                frame.x(text.x),
                frame.y(text.y),
                text.text,
                ha={"start": "left", "middle": "center", "end": "right"}[text.anchor],
                va="center",
                zorder=2.5,
                **({"bbox": backing} if text.backed else {}),
                **(_muted() if text.muted else {"fontsize": 9}),
            )
        self.y += chart.height * frame.lane_scale

    def _draw_network_line(self, line: NetworkLine, frame: _Frame) -> None:
        colour = colours()[line.look]
        end = line.shaft_end
        xs, ys = [frame.x(line.x1), frame.x(end[0])], [frame.y(line.y1), frame.y(end[1])]
        style = (0, (2.5, 1.5)) if line.dashed else "-"
        self.axes.plot(xs, ys, color=colour, linewidth=0.72 * line.width, linestyle=style, zorder=1)
        if line.arrow:
            corners = [(frame.x(px), frame.y(py)) for px, py in line.head]
            self.axes.fill(*zip(*corners, strict=True), color=colour, linewidth=0, zorder=2)


class _Frame(NamedTuple):
    """Where a lane is: its upper left corner, pixels per unit of its axis, and per pixel of its height."""

    left: float
    top: float
    per_unit: float = 1.0
    lane_scale: float = 1.0

    def x(self, value: float) -> float:
        return self.left + value * self.per_unit

    def y(self, pixels: float) -> float:
        return self.top + pixels * self.lane_scale


def _muted(size: float = SMALL) -> dict[str, Any]:
    return {"fontsize": size, "color": colours()["muted"]}


def _text_width(texts: Sequence[str], per_character: float) -> float:
    """About how many pixels the longest text takes."""
    return max((per_character * len(text) for text in texts), default=0.0)


def _bar_look(look: str, *, outlined: bool) -> dict[str, Any]:
    if look == "hatched":
        return {"facecolors": "white", "hatch": "////", "edgecolor": colours()["hatch-line"], "linewidth": 0}
    return {"facecolors": colours()[look], "edgecolors": "white" if outlined else "none", "linewidth": 0.3}
