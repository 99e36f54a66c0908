"""What a comparison comes to, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.compare.rows import BASELINE, Row
from skyctl.compare.words import seconds, times

SAME = 0.005
"""Below this part a plan is not called faster."""
NOISE = 0.02
"""Measured steps that differ by less are taken for equal."""


def best_of(compared: Sequence[Row]) -> Row | None:
    """The row that the others are for: the fastest, of those that are as good the best proved one.

    By the measured step where any was measured, and then within ``NOISE``. None where there is no plan.
    """
    rows = [row for row in compared if row.predicted_s is not None]
    if any(row.measured for row in rows):
        rows = [row for row in rows if row.measured]
    if not rows:
        return None
    limit_s = min(map(_shown_s, rows)) * (1 + (NOISE if rows[0].measured else 1e-9))
    near = [row for row in rows if _shown_s(row) <= limit_s]
    order = {"optimal": 0, "bounded": 1, "feasible": 2}
    return min(near, key=lambda row: (order.get(row.status, 3), row.strategy == BASELINE, _shown_s(row)))


def _shown_s(row: Row) -> float:
    return row.measured.median if row.measured else row.predicted_s or 0.0


def verdict(compared: Sequence[Row]) -> str:
    """``optimal is 2.26× faster than even, predicted; 2.15× measured``."""
    best = best_of(compared)
    if best is None:
        return "no strategy gives a plan that fits"
    base = next((row for row in compared if row.strategy == BASELINE), None)
    if base is None or best.predicted_speedup is None:
        lead = f"{base.strategy} does not fit; " if base is not None and base.predicted_s is None else ""
        return f"{lead}{best.strategy} takes {_steps(best)}"
    said = best.measured_speedup if best.measured_speedup is not None else best.predicted_speedup
    if best.strategy == BASELINE or said < 1 + SAME:
        hoped = max(compared, key=lambda row: (row.predicted_speedup or 0.0, row.status == "optimal"))
        if hoped.measured_speedup is not None and (hoped.predicted_speedup or 0.0) >= 1 + SAME:
            expected = f"{hoped.strategy} was predicted {times(hoped.predicted_speedup)} faster"
            return (
                f"nothing beat even when it was run: {expected}, and measured {times(hoped.measured_speedup)}"
            )
        others = [row.strategy for row in compared if row.strategy != BASELINE]
        gains = f"; {' and '.join(others)} gain{'' if len(others) > 1 else 's'} nothing" if others else ""
        return f"nothing beats even here: {_steps(base)}{gains}"
    text = f"{best.strategy} is {times(best.predicted_speedup)} faster than even, predicted"
    if best.measured_speedup is not None:
        text += f"; {times(best.measured_speedup)} measured"
    return text


def _steps(row: Row) -> str:
    text = f"{seconds(row.predicted_s)} a step, predicted"
    return text + (f"; {seconds(row.measured.median)} measured" if row.measured else "")
