"""The shares of microbatches by rank once somebody has left: all are to finish together. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from skyctl.worker.rank_order import IndexRange

_REMEMBERED = 8
"""Steps, whose median is a member's pace."""
_CHANGE_STEPS, _CHANGE = 2, 1.4
"""After so many steps in a row that differ from it so many times, only they are remembered."""
WORTHWHILE = 1.1
"""Shares are dealt anew where a step would be so many times shorter: data is then read from another place."""


def numbers_in(ranges: Iterable[IndexRange]) -> set[int]:
    """The numbers in ranges [first, stop)."""
    return {number for first, stop in ranges for number in range(first, stop)}


def ranges_of(numbers: Iterable[int]) -> tuple[IndexRange, ...]:
    """The numbers as ranges [first, stop), in order."""
    ranges: list[IndexRange] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)


def deal(count: int, paces: Mapping[int, float], begun_s: Mapping[int, float]) -> dict[int, int]:
    """How many of so many microbatches each rank makes, so that the last one ends as early as can be.

    Args:
        paces: by rank, seconds that it takes for one.
        begun_s: by rank, seconds for which it is busy before.
    """
    counts = dict.fromkeys(paces, 0)
    for _ in range(count):
        rank = min(paces, key=lambda r: (begun_s.get(r, 0.0) + (counts[r] + 1) * paces[r], r))
        counts[rank] += 1
    return counts


def even_shares(microbatches: int, paces: Mapping[int, float]) -> dict[int, IndexRange]:
    """By rank, its range of a step's microbatches: each has one at least, as far as there are enough."""
    ranks = sorted(paces)
    first = dict.fromkeys(sorted(ranks, key=lambda r: (paces[r], r))[:microbatches], 1)
    begun_s = {rank: paces[rank] * first.get(rank, 0) for rank in ranks}
    counts = deal(microbatches - len(first), paces, begun_s)
    shares: dict[int, IndexRange] = {}
    at = 0
    for rank in ranks:
        count = counts[rank] + first.get(rank, 0)
        shares[rank] = (at, at + count)
        at += count
    return shares


class Paces:
    """How fast members are, as they told of the last steps, to deal shares anew where that has changed."""

    def __init__(self) -> None:
        self._told: dict[int, deque[float]] = {}

    def deal_anew(
        self, told: Mapping[int, float | None], shares: Mapping[int, IndexRange], microbatches: int
    ) -> dict[int, IndexRange] | None:
        """Other shares with which the last member would be done clearly earlier; None: there are none.

        Args:
            told: by member, seconds that it took for a microbatch of the last step; None: it made none.
            shares: as they are.
        """
        for rank, pace_s in told.items():
            if pace_s is not None:
                self._remember(rank, pace_s)
        if not self._told.keys() >= told.keys():
            return None
        paces = {rank: median(self._told[rank]) for rank in told}
        anew = even_shares(microbatches, paces)
        if _last_s(anew, paces) * WORTHWHILE >= _last_s(shares, paces):
            return None
        return anew

    def _remember(self, rank: int, pace_s: float) -> None:
        steps = self._told.setdefault(rank, deque(maxlen=_REMEMBERED))
        steps.append(pace_s)
        usual_s, last = median(steps), list(steps)[-_CHANGE_STEPS:]
        if min(last) > usual_s * _CHANGE or max(last) * _CHANGE < usual_s:
            self._told[rank] = deque(last, maxlen=_REMEMBERED)


def _last_s(shares: Mapping[int, IndexRange], paces: Mapping[int, float]) -> float:
    return max((stop - first) * paces[rank] for rank, (first, stop) in shares.items())


def hand_out(missing: Sequence[int], counts: Mapping[int, int]) -> dict[int, tuple[IndexRange, ...]]:
    """The missing microbatches, so many to each rank; ranks that get none are left out."""
    handed: dict[int, tuple[IndexRange, ...]] = {}
    at = 0
    for rank in sorted(counts):
        if counts[rank]:
            handed[rank] = ranges_of(missing[at : at + counts[rank]])
            at += counts[rank]
    return handed
