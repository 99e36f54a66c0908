"""The one definition of every median and quantile that skyctl reports."""

from __future__ import annotations

from collections.abc import Iterable

from skyctl.records.measurement import Quantiles


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which the part ``share`` of them is, 0 ≤ share ≤ 1.

    Linear between the two nearest ranks, counted from the smallest at 0 to the largest at 1: definition 7
    of Hyndman and Fan (1996), numpy's default. ValueError where there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a quantile of no values")
    if not 0 <= share <= 1:
        raise ValueError(f"a quantile's share is in [0, 1], not {share}")
    place = share * (len(ordered) - 1)
    below = min(int(place), max(0, len(ordered) - 2))
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # The clamp: rounding must not take the figure out of the two values it lies between.
    return min(max(low + (high - low) * (place - below), low), high)


def median(values: Iterable[float]) -> float:
    """The middle value (the mean of the middle two)."""
    return quantile(values, 0.5)


def quantiles(steps: Iterable[float]) -> Quantiles:
    """Median, p10 and p90 of step times, in seconds.

    Args:
        steps: without the warm-up step; leaving it out is the caller's part.
    """
    values = list(steps)
    return Quantiles(median=median(values), p10=quantile(values, 0.1), p90=quantile(values, 0.9))
