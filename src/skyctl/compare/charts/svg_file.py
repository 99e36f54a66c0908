"""Charts as SVG files: the report's marks on a page of their own, with names and figures around them."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from skyctl.compare.charts.chart import (
    Chart,
    ChartGroup,
    ChartLane,
    LaneChart,
    LegendEntry,
    LineChart,
    MatrixChart,
    TextPart,
)
from skyctl.compare.charts.device_names import device_names, shortened
from skyctl.compare.charts.network_chart import NetworkChart
from skyctl.compare.charts.templates import TEMPLATES, printed, template_environment
from skyctl.files import write_atomic

# All lengths are in pixels of a page that is 1000 pixels wide, counted from its upper left corner.
WIDTH = 1000.0
MARGIN = 20.0
COLUMN_GAP = 18.0
LANE_GAP, DENSE_GAP = 8.0, 2.0
CURVES_HEIGHT = 250.0
MAX_CELL_WIDTH, CELL_HEIGHT = 100.0, 56.0
MAP_COLUMNS = 3
"""So many maps fit side by side; one alone is as large as each of them."""
MAX_NOTE = 34
"""Characters of a lane's small note."""
NORMAL, SMALL, TINY = 13.0, 11.5, 10.0
"""Font sizes."""


def write_svg(path: str | Path, *groups: ChartGroup) -> Path:
    """Draws the groups below each other.

    Returns:
        The path written.

    Raises:
        SkyctlError: the file can't be written.
    """
    page = _Page()
    for group in groups:
        page.draw_legend(group.legend, MARGIN)
        for row in group.rows:
            page.draw_row(row)
        for note in group.notes:
            page.write_lines(MARGIN, note)
    return write_atomic(path, page.document(), mode=None)


@cache
def style() -> str:
    """``charts.css`` in its colours for light screens; not every program that shows SVG knows variables."""
    palette = (TEMPLATES / "palette.css").read_text(encoding="utf-8").partition("}")[0]
    colours = dict(re.findall(r"--([\w-]+):(#\w+)", palette))
    rules = (TEMPLATES / "charts.css").read_text(encoding="utf-8")
    return re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], rules)


class _Page:
    """An SVG document under way. ``y``: how far down it is drawn."""

    def __init__(self) -> None:
        self.templates: Any = template_environment().get_template("charts.html").module
        self.parts: list[str] = []
        self.y = MARGIN

    def document(self) -> str:
        """The whole file, as high as what was drawn."""
        height = _number(self.y + MARGIN / 2)
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{height}" '
                f'viewBox="0 0 {WIDTH:g} {height}">',
                f"<style>\n{style()}</style>",
                f"<defs>{self.templates.hatch()}</defs>",
                '<rect width="100%" height="100%" class="page"></rect>',
                *self.parts,
                "</svg>\n",
            )
        )

    def write(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = NORMAL,
        anchor: str = "start",
        look: str = "",
        ink: str = "",
        is_turned: bool = False,
    ) -> None:
        """Text whose middle is at that height, muted unless ``look`` or ``ink`` gives another colour."""
        # The sheet's rule for all text is stronger than an attribute, but not than a style.
        style = f"font-size:{size:g}px" + (f";fill:{ink}" if ink else "")
        turned = f' transform="rotate(-60 {_number(x)} {_number(y)})"' if is_turned else ""
        self.parts.append(
            f'<text x="{_number(x)}" y="{_number(y + 0.35 * size)}" text-anchor="{anchor}" '
            f'style="{style}" class="{look}"{turned}>{escape(printed(text))}</text>'
        )

    def write_parts(self, x: float, y: float, parts: Sequence[TextPart]) -> None:
        """A line of small text, its strong parts bold and dark."""
        spans = "".join(f'<tspan class="{part.style}">{escape(printed(part.text))}</tspan>' for part in parts)
        self.parts.append(
            f'<text x="{_number(x)}" y="{_number(y + 4)}" style="font-size:{SMALL}px;white-space:pre">'
            f"{spans}</text>"
        )

    def write_lines(self, x: float, text: str) -> None:
        """A paragraph in small muted text below what is drawn so far."""
        for line in textwrap.wrap(text, 150):
            self.write(x, self.y + 8, line, size=SMALL)
            self.y += 16

    def draw_field(
        self,
        place: tuple[float, float, float, float],
        marks: Markup,
        *,
        look: str = "",
        alt_text: str = "",
        view: tuple[float, float] | None = None,
    ) -> None:
        """Marks in a rectangle of their own (x, y, width, height), whose sides are 100% or as in ``view``."""
        x, y, width, height = map(_number, place)
        box = "" if view is None else f' viewBox="0 0 {view[0]:g} {view[1]:g}"'
        label = f' role="img" aria-label="{escape(printed(alt_text))}"' if alt_text else ""
        self.parts.append(
            f'<svg x="{x}" y="{y}" width="{width}" height="{height}" overflow="visible"'
            f' class="{look}"{box}{label}>{marks}</svg>'
        )

    def draw_legend(self, entries: Sequence[LegendEntry], x: float) -> None:
        """All entries in a line, in another one where the first is full."""
        if not entries:
            return
        left, y = x, self.y + 8
        for entry in entries:
            width = 29 + _text_width([entry.text], SMALL) + 18
            if x > left and x + width > WIDTH - MARGIN:
                x, y = left, y + 18
            self.draw_field((x, y - 6, 22, 12), self.templates.legend_mark(entry), view=(22, 12))
            self.write(x + 29, y, entry.text, size=SMALL)
            x += width
        self.y = y + 18

    def draw_row(self, charts: Sequence[Chart]) -> None:
        """Charts side by side, each under its title."""
        columns = max(len(charts), MAP_COLUMNS if isinstance(charts[0], NetworkChart) else 1)
        width = (WIDTH - 2 * MARGIN - 2 * COLUMN_GAP * (columns - 1)) / columns
        top, bottom = self.y, self.y
        for i, chart in enumerate(charts):
            self.y, x = top, MARGIN + i * (width + 2 * COLUMN_GAP)
            self.write(x, self.y + 12, shortened(chart.title, 60), size=15, look="strong")
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
        self.write(x + width, self.y - 16, summary, size=SMALL, anchor="end")
        self.draw_legend(chart.legend, x)
        lanes = [lane for panel in chart.panels for lane in panel.lanes]
        names = device_names([lane.name for lane in lanes], 28)
        shown = [names[lane.name] + lane.name_suffix for lane in lanes]
        notes = [shortened(note, MAX_NOTE) for lane in lanes for note in lane.notes[:1]]
        figures = [lane.value + lane.remark for lane in lanes]
        details = [detail for lane in lanes for detail in lane.details[:1]]
        left = x + max(_text_width(shown, NORMAL), _text_width(notes, TINY)) + COLUMN_GAP
        right = x + width - COLUMN_GAP - max(_text_width(figures, NORMAL), _text_width(details, TINY))
        step = chart.lane_height + (0 if chart.lane_height < 12 else DENSE_GAP if chart.dense else LANE_GAP)
        self.parts.append(f'<g class="{"gantt" if chart.dense else ""}">')
        for panel in chart.panels:
            if panel.heading:
                self.write_parts(x, self.y + 8, panel.heading)
                self.y += 22
            for lane in panel.lanes:
                marks = self.templates.lane_marks(lane, chart, panel.merged)
                place = (left, self.y, right - left, chart.lane_height)
                self.draw_field(place, marks, alt_text=lane.alt_text)
                self._write_lane(lane, names[lane.name] + lane.name_suffix, chart, x, x + width)
                self.y += step
        self.parts.append("</g>")
        self._draw_axis(chart.axis.tick_percents(), chart.axis.label, left, right)
        for text in (*chart.notes, "".join(part.text for part in chart.caption)):
            self.write_lines(x, text)

    def _write_lane(self, lane: ChartLane, name: str, chart: LaneChart, x: float, end: float) -> None:
        """A lane's name from ``x`` on, its figures up to ``end``; small lines only if they have room."""
        middle, size = self.y + chart.lane_height / 2, min(NORMAL, 0.8 * chart.lane_height)
        has_room = chart.lane_height > 24
        note, detail = lane.notes[: int(has_room)], lane.details[: int(has_room)]
        look = "named" if chart.dense or lane.indented else "strong"
        self.write(x + 12 * lane.indented, middle - 7 * len(note), name, size=size, look=look)
        self.write(
            end, middle - 7 * len(detail), lane.value + lane.remark, size=size, anchor="end", look="named"
        )
        for text in note:
            self.write(x, middle + 8, shortened(text, MAX_NOTE), size=TINY)
        for text in detail:
            self.write(end, middle + 8, text, size=TINY, anchor="end")

    def _draw_axis(self, ticks: Sequence[tuple[float, str]], label: str, left: float, right: float) -> None:
        self.draw_field((left, self.y, right - left, 22), self.templates.axis_marks(ticks), look="axis")
        self.write(right, self.y + 30, label, size=SMALL, anchor="end")
        self.y += 42

    def _draw_line_chart(self, chart: LineChart, x: float, width: float) -> None:
        self.write(x, self.y + 2, chart.y_unit, size=SMALL)
        left, right, top = x + 46, x + width - 8, self.y + 18
        place = (left, top, right - left, CURVES_HEIGHT)
        self.draw_field(place, self.templates.curve_field(chart), look="field", alt_text=chart.alt_text)
        self.y = top + CURVES_HEIGHT
        self._draw_axis(chart.x_tick_percents(), chart.x_unit, left, right)

    def _draw_matrix(self, chart: MatrixChart, x: float, width: float) -> None:
        self.write_lines(x, chart.key)
        names = device_names(chart.names, 12)
        left = x + max(40.0, _text_width(names.values(), SMALL)) + 10
        wide = min(MAX_CELL_WIDTH, (x + width - left) / max(1, len(chart.names)))
        high, size = min(wide, CELL_HEIGHT), max(5.0, min(SMALL, 0.2 * wide))
        is_turned = wide < 60  # pixels, about as wide as a name
        self.y += 80 if is_turned else 26
        for i, name in enumerate(chart.names):
            self.write(
                left + (i + 0.5) * wide,
                self.y - 10,
                names[name],
                size=max(8.0, size),
                anchor="start" if is_turned else "middle",
                look="named",
                is_turned=is_turned,
            )
        for name, row in zip(chart.names, chart.cells, strict=True):
            middle = self.y + high / 2
            self.write(left - 10, middle, names[name], size=max(8.0, size), anchor="end", look="named")
            for i, cell in enumerate(row):
                lines, ink = (cell.lines, cell.ink) if cell is not None else (("·",), "black")
                if cell is not None and cell.fill is not None:
                    self.parts.append(
                        f'<rect x="{_number(left + i * wide)}" y="{_number(self.y)}" width="{_number(wide)}" '
                        f'height="{_number(high)}" fill="rgb{cell.fill}" class="cut">'
                        f"{self.templates.tooltip(cell.tooltip)}</rect>"
                    )
                for number, text in enumerate(lines):
                    y = middle + 1.2 * size * (number - (len(lines) - 1) / 2)
                    self.write(left + (i + 0.5) * wide, y, text, size=size, anchor="middle", ink=ink)
            self.y += high
        self.y += 10

    def _draw_network(self, chart: NetworkChart, x: float, width: float) -> None:
        height = chart.height * width / chart.width
        self.draw_field(
            (x, self.y, width, height),
            self.templates.network_marks(chart),
            look="map",
            alt_text=chart.alt_text,
            view=(chart.width, chart.height),
        )
        self.y += height


def _number(value: float) -> str:
    return str(printed(float(value)))


def _text_width(texts: Iterable[str], size: float) -> float:
    """About how many pixels the longest text takes; fonts differ, so it is rather too much."""

    def ems(text: str) -> float:
        return sum(1.0 if unicodedata.east_asian_width(sign) in "WF" else 0.58 for sign in text)

    return size * max(map(ems, texts), default=0.0)
