"""Plans next to a plan: what a short descent tries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyctl.planner.model import Piece

Pieces = tuple[Piece, ...]


def moves(pieces: Sequence[Piece]) -> Iterator[Pieces]:
    """Layers handed from any stage to any other (those between shift), and two devices exchanged."""
    count = len(pieces)
    for size in (1, 2, 4, 8):
        for i in range(count):
            if pieces[i].stop - pieces[i].start <= size:
                continue
            for j in range(count):
                if i != j:
                    yield _handed(pieces, i, j, size)
    for i in range(count):
        for j in range(i + 1, count):
            other = list(pieces)
            other[i] = pieces[i]._replace(device=pieces[j].device)
            other[j] = pieces[j]._replace(device=pieces[i].device)
            yield tuple(other)


def _handed(pieces: Sequence[Piece], giver: int, taker: int, size: int) -> Pieces:
    shift = -size if giver < taker else size
    low, high = min(giver, taker), max(giver, taker)
    return tuple(
        Piece(
            d,
            p + shift if low < s <= high else p,
            q + shift if low <= s < high else q,
        )
        for s, (d, p, q) in enumerate(pieces)
    )
