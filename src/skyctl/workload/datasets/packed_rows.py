"""Samples packed into rows: best fit decreasing, so that few tokens of a row stay empty."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows of at most ``room`` tokens that have all samples once, as numbers of samples.

    The longest sample goes first, each into the row in which it leaves the least room.

    Args:
        lengths: by sample its tokens, from 1 to ``room``.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # sorted: (tokens that are left, the row's number)
    for sample in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        place = bisect_left(free, (lengths[sample], 0))
        if place == len(free):
            left, row = room, len(rows)
            rows.append([])
        else:
            left, row = free.pop(place)
        rows[row].append(sample)
        if left > lengths[sample]:
            insort(free, (left - lengths[sample], row))
    return rows
