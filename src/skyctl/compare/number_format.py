"""Figures as people read them: seconds, ratios, per cent, bytes. Unknown is a dash, never a zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyctl.records.interval import Interval

UNKNOWN = "–"


def format_seconds(value_s: float | None) -> str:
    """Three significant digits, in s, ms or µs: ``1.61 s``, ``84.0 ms``."""
    return UNKNOWN if value_s is None else " ".join(_scale_seconds(value_s))


def format_seconds_range(low_s: float, high_s: float) -> str:
    """``1.58–1.71``, with the units only where they differ: ``831 ms–1.06 s``."""
    (low, low_unit), (high, high_unit) = _scale_seconds(low_s), _scale_seconds(high_s)
    return f"{low}–{high}" if low_unit == high_unit else f"{low} {low_unit}–{high} {high_unit}"


def format_estimate(value_s: float | None, interval: Interval | None) -> str:
    """A time and where it may lie, in one unit and with the same digits: ``1.38 s (1.36–1.45)``."""
    return " ".join(estimate_parts(value_s, interval))


def estimate_parts(value_s: float | None, interval: Interval | None) -> list[str]:
    """As ``format_estimate``, in two parts: the time, and in brackets its interval where it has one."""
    if value_s is None or interval is None:
        return [format_seconds(value_s)]
    factor, unit = _unit_of(value_s)
    digits = _decimals(value_s * factor)
    value, low, high = (f"{s * factor:.{digits}f}" for s in (value_s, interval.low_s, interval.high_s))
    return [f"{value} {unit}", f"({low}–{high})"]


def _scale_seconds(value_s: float) -> tuple[str, str]:
    """(three significant digits, their unit)."""
    factor, unit = _unit_of(value_s)
    return _format_three_digits(value_s * factor), unit


def _unit_of(value_s: float) -> tuple[float, str]:
    """The largest unit of which a time is at least 1: (how many of it a second has, its name)."""
    if value_s == 0 or value_s >= 0.9995:
        return 1, "s"
    return (1e3, "ms") if value_s * 1e3 >= 0.9995 else (1e6, "µs")


def format_span(seconds: float) -> str:
    """A long time, roughly, in the unit that says something: ``40 s``, ``12 min``, ``5 h``, ``3 d``."""
    for unit, size, most in (
        ("s", 1.0, 90.0),
        ("min", 60.0, 90.0),
        ("h", 3600.0, 36.0),
        ("d", 86_400.0, 900.0),
    ):
        if seconds < size * most:
            return f"{int(seconds / size)} {unit}"
    return f"{int(seconds / 86_400 / 365.2425)} years"


def format_ratio(value: float | None) -> str:
    """A ratio as a speed-up: ``1.79×``."""
    return UNKNOWN if value is None else f"{_format_three_digits(value)}×"


def format_ratio_interval(low: float, high: float) -> str:
    """The range in which a ratio may lie: ``1.71–1.86``."""
    return f"{_format_three_digits(low)}–{_format_three_digits(high)}"


def format_percent(value: float | None, *, sign: bool = True) -> str:
    """A share as per cent, with its sign: ``+2.4%``."""
    if value is None:
        return UNKNOWN
    rounded = round(100 * value, 1) + 0.0  # + 0.0: no minus before a zero
    minus = "−" if rounded < 0 else "+" if sign else ""
    return f"{minus}{abs(rounded):.1f}%"


def format_prediction_error(value: float | None) -> str:
    """How far predicted seconds are from the measured ones, and to which side: ``12.3% too short``."""
    return " ".join(prediction_error_parts(value))


def prediction_error_parts(value: float | None) -> list[str]:
    """The same as one line or two: ``12.3%``, ``too short``."""
    if value is None:
        return [UNKNOWN]
    if round(100 * value, 1) == 0:
        return ["as", "measured"]
    return [format_percent(abs(value), sign=False), f"too {'long' if value > 0 else 'short'}"]


def format_number(value: float | None) -> str:
    """A number with three decimals: ``4.061``."""
    return UNKNOWN if value is None else f"{value:.3f}"


def format_gap(value: float | None) -> str:
    """``proved`` where nothing can be better, else how far it is above the bound: ``+18.6%``."""
    if value is None:
        return UNKNOWN
    return "proved" if value <= 1e-9 else format_percent(value)


def _format_three_digits(value: float) -> str:
    """Three significant digits without an exponent: ``4.21``, ``42.1``, ``421``, ``4210``."""
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    """After the point, so that there are three significant digits."""
    return 0 if value >= 99.95 else 1 if value >= 9.995 else 2


BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count_bytes: float | None) -> str:
    """``3.2 GiB``; None is ``unlimited memory``."""
    if count_bytes is None:
        return "unlimited memory"
    value, unit = float(count_bytes), BYTE_UNITS[0]
    for unit in BYTE_UNITS:
        if value < 1000 or unit == BYTE_UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{format_figure(value)} {unit}"


def format_figure(value: float | None) -> str:
    """Three digits, no exponent: ``0.0421``, ``4.21``, ``42.1``, ``421``, ``4210``."""
    if value is None:
        return UNKNOWN
    return f"{value:.3g}" if value < 0.995 else _format_three_digits(value)
