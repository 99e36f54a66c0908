"""Long steps with shared resources, and with all microbatches in flight: what repeats is counted, not played.

**A period.** Messages that queue for a shared resource repeat as all else does (``recurrence.py``), but
devices are not in the same round at the same moment. So a shorter step is played, and where all of its last
times, for longer than anything lasts in the pipeline, are those of some rounds before and the same seconds
later, its state is the same but for a shift in time: the longer step is one like it with more such periods.

**Lines.** With all microbatches in flight (GPipe) nothing holds the first stages back, and rounds do not
repeat. A stage's end is then the longest of paths that each grow by a fixed time a microbatch, so a convex
function of their number: once it grows by the largest of these times, it does so for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyctl.schedule.recurrence import EQUAL

WHOLE_STEP = 2_048
"""Microbatches up to which all of a step are played."""
FIRST_PLAYED = 512
"""Microbatches of the first step that is looked at; then twice as many, up to a quarter of all."""
DEPTHS = 8
"""At least so many times the microbatches in flight are played, before anything is taken to repeat."""
Ends = list[float]


def periodic_ends(
    play: Callable[[int], Ends], series: Callable[[int], list[list[float]]], microbatches: int, depth: int
) -> Ends:
    """When each stage ends a step of that many microbatches, in seconds.

    Args:
        play: the same of a step that is played, by its number of microbatches.
        series: that step's times, a list for each stage and kind, by round: all that is then in the pipeline.
        depth: the most microbatches that are in flight or wait for anything.
    """
    played = max(FIRST_PLAYED, DEPTHS * depth)
    while played <= microbatches // 4:
        cycle = _find_period(series(played), played - depth - 1, depth)
        if cycle is not None:
            period, seconds = cycle
            left_out = (microbatches - played) // period
            return [end + left_out * seconds for end in play(microbatches - left_out * period)]
        played *= 2
    return play(microbatches)


def _find_period(series: Sequence[Sequence[float]], last: int, depth: int) -> tuple[int, float] | None:
    """(rounds, seconds) of the shortest period up to round ``last``, or None: nothing repeats yet."""
    if not series:
        return None
    for period in range(1, last // DEPTHS + 1):
        first = last - 2 * (period + depth)
        if first < period:
            return None
        some = series[0]
        times = (last - first) // period
        seconds = (some[last] - some[last - times * period]) / times
        within = EQUAL * seconds
        if all(
            -within <= row[m] - row[m - period] - seconds <= within
            for row in series
            for m in range(last, first, -1)
        ):
            return period, seconds
    return None


def straight_ends(play: Callable[[int], Ends], growth_s: Sequence[float], microbatches: int) -> Ends:
    """When each stage ends a step in which all of that many microbatches are in flight, in seconds.

    Args:
        play: the same of a step that is played, by its number of microbatches.
        growth_s: by stage, the largest of the times by which its end may grow with each microbatch.
    """
    played = FIRST_PLAYED
    while 2 * played <= microbatches // 2:
        few, many = play(played), play(2 * played)
        if all(
            b - a >= played * growth * (1 - EQUAL) for a, b, growth in zip(few, many, growth_s, strict=True)
        ):
            left_out = microbatches - 2 * played
            return [end + left_out * growth for end, growth in zip(many, growth_s, strict=True)]
        played *= 2
    return play(microbatches)
