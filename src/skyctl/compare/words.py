"""Figures as people read them: seconds, ratios, per cent. Unknown is a dash, never a zero."""

from __future__ import annotations

UNKNOWN = "–"


def seconds(value_s: float | None) -> str:
    """Three significant digits, in s, ms or µs: ``1.61 s``, ``84.0 ms``."""
    if value_s is None:
        return UNKNOWN
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        scaled = value_s * factor
        if scaled >= 0.9995 or unit == "µs" or value_s == 0:
            return f"{_three(scaled)} {unit}"
    raise AssertionError("µs is the last unit")


def times(value: float | None) -> str:
    """A speed-up: ``1.79×``."""
    return UNKNOWN if value is None else f"{_three(value)}×"


def percent(value: float | None, *, sign: bool = True) -> str:
    """A share as per cent, with its sign: ``+2.4 %``."""
    if value is None:
        return UNKNOWN
    rounded = round(100 * value, 1) + 0.0  # + 0.0: no minus before a zero
    return f"{rounded:+.1f} %".replace("-", "−") if sign else f"{rounded:.1f} %".replace("-", "−")


def number(value: float | None, digits: int = 3) -> str:
    """A plain figure with that many decimals."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def gap(value: float | None) -> str:
    """``proved`` where nothing can be better, else how far the bound lies below."""
    if value is None:
        return UNKNOWN
    return "proved" if value <= 1e-9 else percent(value)


def _three(value: float) -> str:
    """Three significant digits, no exponent."""
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"
