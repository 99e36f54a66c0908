"""Where things stand along an axis: parts of the width in per cent, so that a figure fits any screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skyctl.compare.report.markup import Markup, el

SHORTEST = 0.05
"""Per cent of the width: what is narrower is drawn this wide."""


@dataclass(frozen=True)
class Scale:
    """From 0 to ``end`` in ``unit``; ``factor``: units of one second (or whatever is measured)."""

    end: float
    factor: float = 1.0
    unit: str = ""

    def at(self, value: float) -> float:
        """Per cent of the width."""
        return 100.0 * value / self.end if self.end > 0 else 0.0

    def x(self, value: float) -> str:
        """The same as an attribute."""
        return f"{self.at(value):.3f}%"

    def wide(self, value: float) -> str:
        """A length as an attribute, never so short that it can't be seen."""
        return f"{max(SHORTEST, self.at(value)):.3f}%"

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """(value, what to write) at round numbers of the unit."""
        values = round_ticks(self.end * self.factor, most)
        step = values[1] if len(values) > 1 else 1.0
        digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
        return [(value / self.factor, f"{value:.{digits}f}") for value in values]


def of_seconds(longest_s: float, room: float = 1.0) -> Scale:
    """A scale that holds ``longest_s``, in s, ms or µs. ``room``: how much longer it is than that."""
    end_s = (longest_s or 1.0) * room
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if end_s * f >= 2), (1e6, "µs"))
    return Scale(end_s, factor, unit)


def round_ticks(end: float, most: int) -> list[float]:
    """0 and its multiples of 1, 2 or 5 times a power of ten up to ``end``, at most ``most`` steps."""
    if end <= 0 or not math.isfinite(end):
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if end / (power * m) <= most)
    return [step * i for i in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def axis(scale: Scale, what: str) -> Markup:
    """The line of figures below a plot: an SVG as wide as the plot. ``what`` comes after the unit."""
    ticks = scale.ticks()
    parts = []
    for value, text in ticks:
        anchor = "start" if value == 0 else "end" if scale.at(value) > 97 else "middle"
        parts.append(el("line", x1=scale.x(value), x2=scale.x(value), y1=0, y2=5))
        parts.append(el("text", text, x=scale.x(value), y=18, text_anchor=anchor))
    label = el("span", f"{scale.unit} {what}".strip(), class_="unit")
    return el("div", el("svg", parts, class_="axis", aria_hidden="true"), label, class_="axis-box")


def grid(scale: Scale, height: float) -> list[Markup]:
    """Faint upright lines at the ticks, from the top of an SVG to its bottom."""
    return [
        el("line", x1=scale.x(value), x2=scale.x(value), y1=0, y2=height, class_="grid")
        for value, _ in scale.ticks()
        if value
    ]


def nice_range(values: Sequence[float], most: int = 4) -> list[float]:
    """Round ticks that enclose the values, which need not begin at 0."""
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]
