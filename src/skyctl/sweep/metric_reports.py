"""The reports of trials on themselves, and which trials are behind the others. Pure.

A report is a line of output that is a JSON object with the metric's key: ``{"step": 10, "loss": 0.42}``.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from statistics import median

from skyctl.records.sweep import SweepMode

LEAST_OTHERS = 3
"""So many other trials must have come as far, for their median to count."""


@dataclass(frozen=True)
class Report:
    """A figure that a trial reported; ``step``: where it said so. ``value`` may be infinite or no number."""

    value: float
    step: int | None = None


def read_report(line: str, metric: str) -> Report | None:
    """The report in a line of output; None: it is none of that metric."""
    text = line.strip()
    if not text.startswith("{"):
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    value = said.get(metric)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    step = said.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**63
    return Report(number, step if is_step else None)


@dataclass
class _Curve:
    """The steps of a trial's reports, ascending, and the best cost up to each; lower is better."""

    steps: list[int] = field(default_factory=list)
    best: list[float] = field(default_factory=list)

    def best_at(self, step: int) -> float | None:
        """The best cost up to a step; None: the trial has not come as far."""
        if not self.steps or self.steps[-1] < step:
            return None
        at = bisect_right(self.steps, step)
        return self.best[at - 1] if at else None


class LearningCurves:
    """The reports of all trials.

    Args:
        grace: reports of a trial before it is compared.
    """

    def __init__(self, mode: SweepMode, grace: int) -> None:
        self._sign, self._grace = (1.0 if mode == "min" else -1.0), grace
        self._curves: dict[int, _Curve] = {}

    def add(self, number: int, report: Report) -> int:
        """A trial's next report; its step: as it says, else the number of the report, from 1."""
        curve = self._curves.setdefault(number, _Curve())
        step = len(curve.steps) + 1 if report.step is None else report.step
        cost = self._sign * report.value
        cost = math.inf if math.isnan(cost) else cost
        curve.best.append(min(cost, curve.best[-1]) if curve.best else cost)
        curve.steps.append(max(step, curve.steps[-1]) if curve.steps else step)
        return step

    def forget(self, number: int) -> None:
        """That trial begins anew, or has failed: its figures do not count."""
        self._curves.pop(number, None)

    def is_behind(self, number: int) -> bool:
        """Whether a trial's best so far is worse than the median of the others' best at the same step."""
        curve = self._curves.get(number)
        if curve is None or len(curve.steps) < self._grace:
            return False
        step = curve.steps[-1]
        others = [
            best
            for other, its in self._curves.items()
            if other != number and (best := its.best_at(step)) is not None
        ]
        return len(others) >= LEAST_OTHERS and curve.best[-1] > median(others)
