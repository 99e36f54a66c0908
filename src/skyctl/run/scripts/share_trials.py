"""Shares of a batch by trial: equal ones first, then those that the times seen so far promise most of. Pure.

A rank's time is a straight line in its samples as far as two trials show one. With one trial, or two that are
too near to each other, it is in proportion to samples; a cgroup's quota, for one, lets a short step run
faster than that, so a second trial corrects the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyctl.errors import InputError
from skyctl.schedule.batch_shares import best_shares, proportional_shares

MAX_TRIALS = 3
LEAST_GAIN = 0.03
"""Other shares have to promise so much less of the slowest rank's time to be tried."""
LEAST_DISTANCE = 0.25
"""Two shares of a rank lie that far apart, relatively, for a line through their times to mean anything."""


@dataclass(frozen=True)
class ShareTrial:
    """By rank, its samples of a step and the seconds of its own that a step took."""

    shares: tuple[int, ...]
    times_s: tuple[float, ...]

    @property
    def slowest_s(self) -> float:
        """The seconds of the rank that took longest."""
        return max(self.times_s)

    @property
    def samples_per_s(self) -> tuple[float, ...]:
        """By rank, the samples that it computes in a second of its own."""
        return tuple(n / s for n, s in zip(self.shares, self.times_s, strict=True))


class ShareTrials:
    """The trials of one script, in order: ``next_shares`` says what to try, ``add`` takes its times."""

    def __init__(self) -> None:
        self._trials: list[ShareTrial] = []

    def add(self, shares: Sequence[int], times_s: Sequence[float]) -> None:
        """Adds a trial: by rank, its samples of a step, and the seconds of its own that a step took (> 0)."""
        self._trials.append(ShareTrial(tuple(shares), tuple(times_s)))

    @property
    def first(self) -> ShareTrial | None:
        """The first trial, of equal shares; None before it."""
        return self._trials[0] if self._trials else None

    @property
    def best(self) -> ShareTrial | None:
        """The one whose slowest rank took least; None before the first."""
        return min(self._trials, key=lambda trial: trial.slowest_s, default=None)

    def next_shares(self) -> tuple[int, ...] | None:
        """Shares to try next; None: none promise enough, or enough have been tried."""
        best = self.best
        if best is None or len(self._trials) == MAX_TRIALS:
            return None
        lines = [self._line(rank) for rank in range(len(best.shares))]
        shares = best_shares(sum(best.shares), [fixed for fixed, _ in lines], [each for _, each in lines])
        expected_s = max(fixed + n * each for n, (fixed, each) in zip(shares, lines, strict=True))
        tried = any(trial.shares == shares for trial in self._trials)
        return None if tried or expected_s > best.slowest_s * (1 - LEAST_GAIN) else shares

    def _line(self, rank: int) -> tuple[float, float]:
        """(seconds whatever the share, seconds of a sample), by the newest trial and one that is apart."""
        newest = self._trials[-1]
        n, time_s = newest.shares[rank], newest.times_s[rank]
        for trial in reversed(self._trials[:-1]):
            other_n, other_s = trial.shares[rank], trial.times_s[rank]
            if abs(n - other_n) < LEAST_DISTANCE * max(n, other_n):
                continue
            each_s = (time_s - other_s) / (n - other_n)
            fixed_s = time_s - n * each_s
            if each_s > 0 and fixed_s >= 0:
                return fixed_s, each_s
        return 0.0, time_s / n


def equal_shares(batch: int | None, ranks: int) -> list[int]:
    """By rank, its samples of a step of a script that has asked ``share(batch)`` without being told any.

    Raises:
        InputError: it has asked for none, so there is nothing to balance.
    """
    if batch is None:
        raise InputError(
            "--balance has no batch to divide: ARGS hold no {share:N}, and the script calls no share(N), or "
            "its ranks call it with unlike N",
            hint="say where the script takes its part: --batch-size '{share:64}', or "
            "skyctl.torch's share(64) before its first step",
        )
    return list(proportional_shares(batch, [1.0] * ranks))


def middle_mean(times_s: Sequence[float]) -> float:
    """The mean of the middle half: no outlier counts, and times of few values are weighed, unlike a median's.

    Args:
        times_s: one or more.
    """
    ordered = sorted(times_s)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)
