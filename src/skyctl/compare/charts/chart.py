"""A picture as data. The report and the SVG files are drawn from the same record.

Along an axis everything has the unit that was measured (seconds, samples per second). Across it, within a
lane, everything is in pixels from the lane's upper edge, of the height that ``LaneChart.lane_height`` gives.
``look`` names a colour or pattern of ``charts.css``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from skyctl.compare.charts.network_chart import NetworkChart

MIN_WIDTH_PERCENT = 0.05
"""Narrower bars are drawn this wide, so that they can be seen."""
MAX_DOTTED_POINTS = 40
"""A curve with more points than this has no dots."""


@dataclass(frozen=True)
class ValueAxis:
    """The axis from left to right, 0 to ``end``, in the unit of the values.

    ``factor`` × a value is the number that is written, in ``unit``; ``caption`` says of what.
    """

    end: float
    factor: float = 1.0
    unit: str = ""
    caption: str = ""

    @property
    def label(self) -> str:
        """The text under the axis, such as ``ms a step``."""
        return f"{self.unit} {self.caption}".strip()

    def percent(self, value: float) -> float:
        """The place of a value, in per cent of the axis's length."""
        return 100.0 * value / self.end if self.end > 0 else 0.0

    def width_percent(self, length: float) -> float:
        """The same of a length, but never so short that it can't be seen."""
        return max(MIN_WIDTH_PERCENT, self.percent(length))

    def ticks(self) -> list[tuple[float, str]]:
        """(value, its number as written) at round numbers of the unit, at most six."""
        values = round_ticks(self.end * self.factor, 5)
        step = values[1] if len(values) > 1 else 1.0
        digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
        return [(value / self.factor, f"{value:.{digits}f}") for value in values]

    def tick_percents(self) -> list[tuple[float, str]]:
        """Of each tick its place in per cent, and the number as it is written."""
        return [(self.percent(value), text) for value, text in self.ticks()]


def seconds_axis(longest_s: float, caption: str, room: float = 1.02) -> ValueAxis:
    """An axis ``room`` times as long as ``longest_s``, written in s, ms or µs."""
    end_s = (longest_s or 1.0) * room
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if end_s * f >= 2), (1e6, "µs"))
    return ValueAxis(end_s, factor, unit, caption)


def round_ticks(end: float, most: int) -> list[float]:
    """0 and its multiples of 1, 2 or 5 times a power of ten up to ``end``, at most ``most`` steps."""
    if end <= 0 or not math.isfinite(end):
        return [0.0]
    step = _round_step(end, most)
    return [step * i for i in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def enclosing_ticks(values: Sequence[float]) -> list[float]:
    """Round ticks that enclose the values; the first need not be 0."""
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    step = _round_step(high - low, 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def _round_step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, the least with at most ``most`` steps in ``span``."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * m for m in (1, 2, 5, 10, 20) if span / (power * m) <= most)


@dataclass(frozen=True)
class TextPart:
    """A piece of a line of text. ``name``: one that a user gave, set in a direction of its own."""

    text: str
    style: Literal["plain", "strong", "name"] = "plain"


@dataclass(frozen=True)
class LegendEntry:
    """The meaning of a colour or line. ``upright``: a line from top to bottom; ``line``: a level one."""

    shape: Literal["swatch", "line", "upright", "dot"]
    look: str
    text: str


@dataclass(frozen=True)
class ChartBar:
    """``tooltip``: shown where the pointer rests, as of all marks."""

    kind: ClassVar[str] = "bar"
    start: float
    length: float
    top: float
    height: float
    look: str
    tooltip: str = ""


@dataclass(frozen=True)
class VerticalLine:
    """A line across the lane, such as the end of a step."""

    kind: ClassVar[str] = "upright"
    at: float
    top: float
    bottom: float
    look: str


@dataclass(frozen=True)
class HorizontalLine:
    """A line along the axis, such as a whisker's."""

    kind: ClassVar[str] = "level"
    start: float
    end: float
    y: float
    look: str


@dataclass(frozen=True)
class ChartDot:
    """A circle: full, or a ring by its ``look``."""

    kind: ClassVar[str] = "dot"
    at: float
    y: float
    radius: float
    look: str
    tooltip: str = ""


@dataclass(frozen=True)
class BarNumber:
    """A number in the middle of a bar that has room for it."""

    kind: ClassVar[str] = "number"
    at: float
    y: float
    text: str
    look: str


Mark = ChartBar | VerticalLine | HorizontalLine | ChartDot | BarNumber


def whisker(low: float, high: float, y: float, half: float, look: str = "whisker") -> tuple[Mark, ...]:
    """A spread: a level line between two short upright ones, ``half`` pixels to each side."""
    ends = (VerticalLine(end, y - half, y + half, look) for end in (low, high))
    return (HorizontalLine(low, high, y, look), *ends)


@dataclass(frozen=True)
class ChartLane:
    """One row: its name, its marks in the order of drawing, its figures at the right.

    ``alt_text``: the same in a sentence, for those who do not see it. ``notes``: small, under the name.
    ``value``: set off from ``remark``, the rest of its line; ``details``: small lines under both.
    ``indented``: it belongs to the lane above.
    """

    name: str
    marks: tuple[Mark, ...]
    alt_text: str
    notes: tuple[str, ...] = ()
    value: str = ""
    remark: str = ""
    details: tuple[str, ...] = ()
    name_suffix: str = ""
    indented: bool = False


@dataclass(frozen=True)
class LanePanel:
    """Lanes under a heading of their own (None: the chart's title is enough).

    ``merged``: so many bars that those of one look are drawn as one shape, without tooltips.
    """

    lanes: tuple[ChartLane, ...]
    heading: tuple[TextPart, ...] | None = None
    merged: bool = False


@dataclass(frozen=True)
class LaneChart:
    """Lanes under each other to one axis. ``summary``: at the title's right.

    ``dense``: lanes close to each other, with names only. ``notes``: a list under the lanes.
    """

    title: str
    axis: ValueAxis
    panels: tuple[LanePanel, ...]
    summary: tuple[TextPart, ...] = ()
    legend: tuple[LegendEntry, ...] = ()
    notes: tuple[str, ...] = ()
    caption: tuple[TextPart, ...] = ()
    lane_height: int = 34
    dense: bool = False


@dataclass(frozen=True)
class CurvePoint:
    """``tooltip``: shown where the pointer rests on its dot."""

    x: float
    y: float
    tooltip: str


@dataclass(frozen=True)
class ChartCurve:
    """``look``: a strategy's (see ``strategy_look``). ``dots``: filled is measured, hollow is predicted."""

    name: str
    points: tuple[CurvePoint, ...]
    look: str
    width: float = 2.0
    dots: Literal["filled", "hollow", "none"] = "none"
    joined: bool = True
    dashed: bool = False

    @property
    def dotted(self) -> tuple[CurvePoint, ...]:
        """The points that are drawn as dots, too."""
        return self.points if self.dots != "none" and len(self.points) <= MAX_DOTTED_POINTS else ()


@dataclass(frozen=True)
class LineChart:
    """Curves over two axes. ``x_ticks``: (value, as written).

    ``y_factor`` × y is the number that is written, in ``y_unit``.
    """

    title: str
    curves: tuple[ChartCurve, ...]
    x_range: tuple[float, float]
    x_ticks: tuple[tuple[float, str], ...]
    x_unit: str
    y_unit: str
    alt_text: str
    y_factor: float = 1.0
    from_zero: bool = False

    @cached_property
    def y_ticks(self) -> list[tuple[float, str]]:
        """(value, as written) from the lower edge to the upper one, in written units."""
        values = [point.y * self.y_factor for curve in self.curves for point in curve.points]
        ticks = enclosing_ticks([0.0, *values] if self.from_zero else values)
        step = ticks[1] - ticks[0]
        digits = 0 if step >= 1 else 1 if step >= 0.1 else 2 if step >= 0.01 else 4
        return [(value, f"{value:.{digits}f}") for value in ticks]

    def x_percent(self, x: float) -> float:
        """The place of an x, in per cent of the width from the left."""
        left, right = self.x_range
        return 100 * (x - left) / (right - left) if right > left else 50.0

    def x_tick_percents(self) -> list[tuple[float, str]]:
        """(place in per cent from the left, as written) of each number under the x axis."""
        return [(self.x_percent(value), text) for value, text in self.x_ticks]

    def y_percent(self, written: float) -> float:
        """The place of a value in written units, in per cent from the top."""
        ticks = self.y_ticks
        return 100 * (1 - (written - ticks[0][0]) / (ticks[-1][0] - ticks[0][0]))


@dataclass(frozen=True)
class MatrixCell:
    """``lines``: what is written in it, in a colour called ``ink``. ``fill``: red, green, blue (0 to 255)."""

    lines: tuple[str, ...]
    tooltip: str = ""
    fill: tuple[int, int, int] | None = None
    ink: str = "black"


@dataclass(frozen=True)
class MatrixChart:
    """A square: rows send, columns receive; a cell that is None shows nothing. ``key``: how to read it."""

    title: str
    names: tuple[str, ...]
    cells: tuple[tuple[MatrixCell | None, ...], ...]
    key: str


Chart = LaneChart | LineChart | MatrixChart | NetworkChart


@dataclass(frozen=True)
class ChartGroup:
    """Charts with one legend. ``rows``: each holds the charts that are drawn side by side.

    ``notes``: small sentences below all of them.
    """

    rows: tuple[tuple[Chart, ...], ...]
    legend: tuple[LegendEntry, ...] = ()
    notes: tuple[str, ...] = ()


KNOWN_STRATEGIES = ("even", "heuristic", "optimal")


def strategy_look(strategy: str, strategies: Sequence[str]) -> str:
    """The look of a strategy's curve; those without one of their own share two."""
    if strategy in KNOWN_STRATEGIES:
        return strategy
    others = [name for name in strategies if name not in KNOWN_STRATEGIES]
    return f"other{others.index(strategy) % 2}"
