"""From when on a time is unusual, by those that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SPREADS = 10.0
"""A time that is longer than the median by so many median deviations is not usual."""


def unusual_after_s(times: Sequence[float], least_spread_s: float = 0.0) -> float:
    """Seconds after which something takes longer than is usual: median + ``SPREADS`` median deviations.

    Args:
        times: what it took before, in seconds; one at least.
        least_spread_s: a deviation in seconds that is usual in any case.
    """
    usual_s = median(times)
    return usual_s + SPREADS * max(least_spread_s, median(abs(value - usual_s) for value in times))
