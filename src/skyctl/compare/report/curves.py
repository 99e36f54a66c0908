"""Lines over two axes, as SVG that is as wide as its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyctl.compare.report.markup import Markup, el, join
from skyctl.compare.report.parts import title
from skyctl.compare.report.scale import nice_range

DOTTED = 40
"""With more points than this a curve has no dots."""


@dataclass(frozen=True)
class Curve:
    """``points``: (x, y, words). ``look``: its colour's name; ``dots``: ``d`` full, ``h`` hollow, or none."""

    name: str
    points: Sequence[tuple[float, float, str]]
    look: str
    width: float = 2.0
    dots: str = ""
    line: bool = True


def plot(
    curves: Sequence[Curve],
    x_range: tuple[float, float],
    x_ticks: Sequence[tuple[float, str]],
    *,
    y_unit: str,
    x_unit: str,
    label: str,
    y_factor: float = 1.0,
    from_zero: bool = False,
) -> Markup:
    """The field with its grid, the curves, and both axes' figures."""
    values = [y * y_factor for curve in curves for _, y, _ in curve.points]
    ticks = nice_range([0.0, *values] if from_zero else values)
    low, high = ticks[0], ticks[-1]
    left, right = x_range
    step = ticks[1] - ticks[0]
    digits = 0 if step >= 1 else 1 if step >= 0.1 else 2 if step >= 0.01 else 4

    def x_at(x: float) -> float:
        return 100 * (x - left) / (right - left) if right > left else 50.0

    def y_at(y: float) -> float:
        return 100 * (1 - (y * y_factor - low) / (high - low))

    lines = []
    for value in ticks:
        y = f"{100 * (1 - (value - low) / (high - low)):.2f}%"
        lines.append(el("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        lines.append(el("text", f"{value:.{digits}f}", x=-10, y=y, dy=4, text_anchor="end"))
    # The widest first, so that curves that lie on each other all show.
    paths = [
        el(
            "path",
            d="M" + "L".join(f"{x_at(x):.3f} {y_at(y):.3f}" for x, y, _ in curve.points),
            class_=f"curve s-{curve.look}",
            stroke_width=curve.width,
        )
        for curve in sorted(curves, key=lambda one: -one.width)
        if curve.line and len(curve.points) > 1
    ]
    drawn = el(
        "svg", paths, view_box="0 0 100 100", preserve_aspect_ratio="none", width="100%", height="100%",
        style="overflow:visible",
    )  # fmt: skip
    dots = [
        el(
            "circle",
            title(words),
            cx=f"{x_at(x):.3f}%",
            cy=f"{y_at(y):.3f}%",
            r=4,
            class_=f"{curve.dots}-{curve.look}",
        )
        for curve in curves
        if curve.dots and len(curve.points) <= DOTTED
        for x, y, words in curve.points
    ]
    field = el("svg", lines, drawn, dots, class_="field", role="img", aria_label=label)
    unit = el("p", y_unit, class_="unit", style="text-align:left;margin:0 0 .5rem -3.2rem")
    return el("div", unit, field, _x_axis([(x_at(x), text) for x, text in x_ticks], x_unit), class_="plot")


def _x_axis(ticks: Sequence[tuple[float, str]], unit: str) -> Markup:
    parts = []
    for at, text in ticks:
        anchor = "start" if at < 3 else "end" if at > 97 else "middle"
        parts.append(el("line", x1=f"{at:.3f}%", x2=f"{at:.3f}%", y1=0, y2=5))
        parts.append(el("text", text, x=f"{at:.3f}%", y=18, text_anchor=anchor))
    drawn = el("svg", join(parts), class_="axis", aria_hidden="true")
    return el("div", drawn, el("span", unit, class_="unit"), class_="axis-box")
