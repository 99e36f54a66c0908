"""The whole numbers that a batch holds, and random ones like them.

Which numbers may come is known of the numbers seen alone: a class target may hold −100, which a loss leaves
out, and nothing from −99 to −1. If the numbers are few, just these are drawn. If they are many, those
between them may come as well, except where that is doubtful.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

Range = tuple[int, int]
"""The first and the last of consecutive whole numbers."""

FEW = 64
"""So many different numbers are taken as they are."""

MOST_RANGES = 64
"""A description has no more ranges, so that it stays small wherever it is sent."""

FAR = 8
"""A gap of so many times the mean gap lies between numbers of different kinds."""

MOST_NUMBERS = 1 << 62
"""So many can be told apart by one draw; of hashes, which are more, some of those seen are drawn."""

_CHUNK = 1 << 20
"""Elements looked at together: sorting takes several times their memory."""


def seen_ranges(tensor: Tensor) -> tuple[Range, ...]:
    """The numbers that may come where those of ``tensor`` (whole numbers, not empty) have come, in order.

    Many different numbers count as one range, cut between negative ones and others and at wide gaps. The
    least and the greatest stay by themselves: either may stand for something else, such as padding.
    """
    seen = _distinct(tensor)
    if len(seen) <= FEW:
        return _joined([(number, number) for number in seen])
    gaps = [b - a for a, b in pairwise(seen)]
    wide = FAR * (seen[-2] - seen[1]) / len(gaps)
    cuts = {0, len(gaps) - 1} | {at for at, (a, b) in enumerate(pairwise(seen)) if a < 0 <= b}
    widest = sorted(range(len(gaps)), key=lambda at: -gaps[at])
    cuts |= {at for at in widest[: MOST_RANGES - 1 - len(cuts)] if gaps[at] > wide}
    starts = [0, *(at + 1 for at in sorted(cuts)), len(seen)]
    ranges = [(seen[start], seen[stop - 1]) for start, stop in pairwise(starts)]
    if sum(high - low + 1 for low, high in ranges) > MOST_NUMBERS:
        ranges = [(number, number) for number in seen[:: -(-len(seen) // MOST_RANGES)]]
    return _joined(ranges)


def draw_numbers(ranges: Sequence[Range], size: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random numbers (int64) of these ranges, every number as likely as another."""
    lows = torch.tensor([low for low, _ in ranges])
    counts = torch.tensor([high - low + 1 for low, high in ranges])
    ends = counts.cumsum(0)
    drawn = torch.randint(int(ends[-1]), size, generator=generator)
    which = torch.searchsorted(ends, drawn, right=True)
    return lows[which] + (drawn - (ends - counts)[which])


def _distinct(tensor: Tensor) -> list[int]:
    """The different numbers of a tensor, in order."""
    numbers = torch.empty(0, dtype=torch.int64)
    for chunk in _chunks(tensor.detach().cpu().reshape(-1)):
        numbers = torch.unique(torch.cat([numbers, chunk]))
    return [int(number) for number in numbers.tolist()]


def _chunks(flat: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if chunk.dtype == torch.uint8:  # pictures: counting is many times as fast as sorting
            yield torch.bincount(chunk).nonzero().reshape(-1)
        else:
            yield torch.unique(chunk.to(torch.int64))


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same numbers in as few ranges as can be; ``ranges`` in order."""
    joined: list[Range] = []
    for low, high in ranges:
        if joined and joined[-1][1] + 1 == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return tuple(joined)
