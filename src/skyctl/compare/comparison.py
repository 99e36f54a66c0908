"""A comparison as a whole: its document (``comparison.json``), its best row, its verdict in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from skyctl.compare.number_format import format_ratio, format_seconds
from skyctl.compare.outcome import BASELINE, PROVED_GAP, ComparisonRow
from skyctl.compare.sweeps import ComparisonSweep
from skyctl.records.base import FileRecord, Seq, since

LEAST_REPORTED_GAIN = 0.005
"""Below this part a plan is not called faster."""
MEASUREMENT_NOISE = 0.02
"""Measured steps that differ by less are taken for equal."""


class Comparison(FileRecord):
    """``comparison.json``, which ``--json`` prints, too. ``files``: by what it is, where it was written.

    ``workload``: as typed. ``verdict``: the comparison in a sentence.
    """

    kind: Literal["skyctl/comparison"] = "skyctl/comparison"
    version: Literal[2] = 2
    cluster: str | None = None
    workload: str | None = None
    rows: Seq[ComparisonRow]
    files: dict[str, str] = Field(default_factory=dict)
    sweeps: Seq[ComparisonSweep] = since(2, ())
    verdict: str | None = since(2, None)


def pick_best_row(compared: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """The row that the others are compared for: the fastest, and of those as fast the best proved one.

    By the measured step where any was measured, and then within ``MEASUREMENT_NOISE``. None: no plan.
    """
    rows = [row for row in compared if row.predicted_s is not None]
    if any(row.measured for row in rows):
        rows = [row for row in rows if row.measured]
    if not rows:
        return None
    noise = MEASUREMENT_NOISE if rows[0].measured else PROVED_GAP
    limit_s = min(row.shown_s or 0.0 for row in rows) * (1 + noise)
    near = [row for row in rows if (row.shown_s or 0.0) <= limit_s]
    order = {"optimal": 0, "bounded": 1, "feasible": 2}
    return min(near, key=lambda row: (order.get(row.status, 3), row.strategy == BASELINE, row.shown_s or 0.0))


def describe_verdict(compared: Sequence[ComparisonRow], *, capitalized: bool = False) -> str:
    """``optimal is 2.26× faster than even, predicted; 2.15× measured``.

    Args:
        capitalized: begin as a heading does; a strategy's name stays as it is.
    """
    best = pick_best_row(compared)
    if best is None:
        return f"{'No' if capitalized else 'no'} strategy gives a plan that fits"
    base = next((row for row in compared if row.strategy == BASELINE), None)
    if base is None or best.predicted_speedup is None:
        lead = f"{base.strategy} does not fit; " if base is not None and base.predicted_s is None else ""
        return f"{lead}{best.strategy} takes {_step_times(best)}"
    speedup = best.measured_speedup if best.measured_speedup is not None else best.predicted_speedup
    if best.strategy == BASELINE or speedup < 1 + LEAST_REPORTED_GAIN:
        return f"{'Nothing' if capitalized else 'nothing'} {_why_nothing(compared, base)}"
    text = f"{best.strategy} is {format_ratio(best.predicted_speedup)} faster than even, predicted"
    if best.measured_speedup is not None:
        text += f"; {format_ratio(best.measured_speedup)} measured"
    return text


def _why_nothing(compared: Sequence[ComparisonRow], base: ComparisonRow) -> str:
    """What follows ``nothing`` where no strategy is faster than even."""
    hoped = max(compared, key=lambda row: (row.predicted_speedup or 0.0, row.status == "optimal"))
    if hoped.measured_speedup is not None and (hoped.predicted_speedup or 0.0) >= 1 + LEAST_REPORTED_GAIN:
        return (
            f"beat even when it was run: {hoped.strategy} was predicted "
            f"{format_ratio(hoped.predicted_speedup)} faster, and measured "
            f"{format_ratio(hoped.measured_speedup)}"
        )
    others = [row.strategy for row in compared if row.strategy != BASELINE]
    gains = f"; {' and '.join(others)} gain{'' if len(others) > 1 else 's'} nothing" if others else ""
    return f"beats even here: {_step_times(base)}{gains}"


def _step_times(row: ComparisonRow) -> str:
    text = f"{format_seconds(row.predicted_s)} a step, predicted"
    return text + (f"; {format_seconds(row.measured.median)} measured" if row.measured else "")
