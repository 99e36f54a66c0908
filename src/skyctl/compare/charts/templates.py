"""The Jinja2 templates that draw charts, for the report's page and for SVG files."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from skyctl.compare.charts.chart import ChartBar, ChartCurve, ChartLane, LineChart, ValueAxis

TEMPLATES = Path(__file__).parents[1] / "templates"
_UNIT = re.compile(r"(\d) (%|s|ms|µs|[KMGT]?i?B)(?!\w)")
"""A figure and its unit, which no line break may part."""


def template_environment() -> Environment:
    """Loads templates by name; all text that is not of the templates is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=printed,
    )
    environment.globals |= {"merged_paths": _merged_paths, "curve_path": _curve_path}
    return environment


def printed(value: object) -> object:
    """The text of an expression in a template, before it is escaped.

    Numbers are as short as they can be; there are no control characters, which HTML and XML do not allow.
    """
    if isinstance(value, Markup):
        return value
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    clean = "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in str(value)
    )
    return _UNIT.sub("\\1\u00a0\\2", clean)


def _merged_paths(lane: ChartLane, axis: ValueAxis) -> list[tuple[str, str]]:
    """(look, SVG path) for the bars of each look together, in thousandths of the axis."""
    paths: dict[str, str] = {}
    for mark in lane.marks:
        if isinstance(mark, ChartBar):
            x, width = 10 * axis.percent(mark.start), max(0.4, 10 * axis.percent(mark.length))
            shape = f"M{x:.2f} {mark.top:g}h{width:.2f}v{mark.height:g}H{x:.2f}z"
            paths[mark.look] = paths.get(mark.look, "") + shape
    return list(paths.items())


def _curve_path(curve: ChartCurve, chart: LineChart) -> str:
    """The curve as an SVG path, in per cent of the field."""
    places = ((chart.x_percent(p.x), chart.y_percent(p.y * chart.y_factor)) for p in curve.points)
    return "M" + "L".join(f"{x:.3f} {y:.3f}" for x, y in places)
