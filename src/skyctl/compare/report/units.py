"""Figures that only the report shows: bytes, rates."""

from __future__ import annotations

from skyctl.compare.words import UNKNOWN

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def memory(count_bytes: float | None) -> str:
    """``3.2 GiB``; None is unlimited."""
    if count_bytes is None:
        return "unlimited memory"
    value, unit = float(count_bytes), UNITS[0]
    for unit in UNITS:
        if value < 1000 or unit == UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{three(value)} {unit}"


def three(value: float | None) -> str:
    """Three digits, no exponent: ``0.0421``, ``4.21``, ``42.1``, ``421``, ``4210``."""
    if value is None:
        return UNKNOWN
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.995 else f"{value:.3g}"
