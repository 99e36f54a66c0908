"""Figures as people read them: seconds, ratios, per cent, bytes. Unknown is a dash, never a zero."""

from __future__ import annotations

UNKNOWN = "–"


def format_seconds(value_s: float | None) -> str:
    """Three significant digits, in s, ms or µs: ``1.61 s``, ``84.0 ms``."""
    return UNKNOWN if value_s is None else " ".join(_scale_seconds(value_s))


def format_seconds_range(low_s: float, high_s: float) -> str:
    """``1.58–1.71``, with the units only where they differ: ``831 ms–1.06 s``."""
    (low, low_unit), (high, high_unit) = _scale_seconds(low_s), _scale_seconds(high_s)
    return f"{low}–{high}" if low_unit == high_unit else f"{low} {low_unit}–{high} {high_unit}"


def _scale_seconds(value_s: float) -> tuple[str, str]:
    """(three significant digits, their unit): the largest unit of which it is at least 1."""
    factor, unit = 1e6, "µs"
    if value_s == 0 or value_s >= 0.9995:
        factor, unit = 1, "s"
    elif value_s * 1e3 >= 0.9995:
        factor, unit = 1e3, "ms"
    return _format_three_digits(value_s * factor), unit


def format_ratio(value: float | None) -> str:
    """A ratio as a speed-up: ``1.79×``."""
    return UNKNOWN if value is None else f"{_format_three_digits(value)}×"


def format_percent(value: float | None, *, sign: bool = True) -> str:
    """A share as per cent, with its sign: ``+2.4 %``."""
    if value is None:
        return UNKNOWN
    rounded = round(100 * value, 1) + 0.0  # + 0.0: no minus before a zero
    minus = "−" if rounded < 0 else "+" if sign else ""
    return f"{minus}{abs(rounded):.1f} %"


def format_number(value: float | None, digits: int = 3) -> str:
    """A number with that many decimals: ``4.061``."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def format_gap(value: float | None) -> str:
    """``proved`` where nothing can be better, else how far it is above the bound: ``+18.6 %``."""
    if value is None:
        return UNKNOWN
    return "proved" if value <= 1e-9 else format_percent(value)


def _format_three_digits(value: float) -> str:
    """Three significant digits without an exponent: ``4.21``, ``42.1``, ``421``, ``4210``."""
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


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
