"""Who makes which microbatches once somebody has left: all are to finish together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from skyctl.worker.rank_order import IndexRange


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


def hand_out(missing: Sequence[int], counts: Mapping[int, int]) -> dict[int, tuple[IndexRange, ...]]:
    """The missing microbatches, so many to each rank; ranks that get none are left out."""
    handed: dict[int, tuple[IndexRange, ...]] = {}
    at = 0
    for rank in sorted(counts):
        if counts[rank]:
            handed[rank] = ranges_of(missing[at : at + counts[rank]])
            at += counts[rank]
    return handed
