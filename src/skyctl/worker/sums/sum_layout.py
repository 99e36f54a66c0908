"""How numbers that several ranks sum are cut: into buckets, a share of each for every route, and chunks.

Every rank makes the same layout from the same model, so no message needs to say which numbers it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

SERIAL_NUMEL = 32_767
"""Of so many elements torch makes one thread's work (at::internal::GRAIN_SIZE is one more)."""


class Piece(NamedTuple):
    """Elements [start, stop) of one of a bucket's tensors, flattened; ``SERIAL_NUMEL`` at most."""

    tensor: int
    start: int
    stop: int


class Chunk(NamedTuple):
    """The content of one message: neighbouring elements of a bucket.

    Attributes:
        bucket: its number.
        pieces: where the elements are, in the order of the message.
        numel: how many they are together.
    """

    bucket: int
    pieces: tuple[Piece, ...]
    numel: int


@dataclass(frozen=True)
class SumLayout:
    """The chunks of a sum.

    Attributes:
        last_layer_of: by bucket, the place of its last layer in the order in which layers become ready.
        routes: by route, its chunks in the order in which they are sent.
    """

    last_layer_of: tuple[int, ...]
    routes: tuple[tuple[Chunk, ...], ...]

    @property
    def buckets(self) -> int:
        """How many hold any numbers."""
        return 1 + max((chunk.bucket for chunks in self.routes for chunk in chunks), default=-1)


def make_layout(layers: Sequence[Sequence[int]], shares: Sequence[float], chunk_numel: int) -> SumLayout:
    """Cuts the tensors of layers into buckets, and each bucket into the routes' chunks.

    Small layers share a bucket until it has a full chunk for every route, so that messages are not small.

    Args:
        layers: elements of each tensor, by layer, in the order in which layers become ready.
        shares: of each bucket's elements, by route; they sum to 1.
        chunk_numel: the most elements of a message, at least 1.
    """
    buckets: list[list[int]] = [[]]
    last_layer_of = [0]
    for place, numels in enumerate(layers):
        if sum(buckets[-1]) >= chunk_numel * len(shares):
            buckets.append([])
            last_layer_of.append(place)
        buckets[-1].extend(numels)
        last_layer_of[-1] = place
    routes: list[list[Chunk]] = [[] for _ in shares]
    for number, numels in enumerate(buckets):
        total = sum(numels)
        ends = [round(total * min(1.0, end)) for end in accumulate(shares)]
        ends[-1] = total
        for route, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            for at in range(start, stop, chunk_numel):
                end = min(stop, at + chunk_numel)
                routes[route].append(Chunk(number, _pieces(numels, at, end), end - at))
    return SumLayout(tuple(last_layer_of), tuple(map(tuple, routes)))


def _pieces(numels: Sequence[int], start: int, stop: int) -> tuple[Piece, ...]:
    """Elements [start, stop) of these tensors in a row, tensor by tensor."""
    pieces = []
    offset = 0
    for tensor, numel in enumerate(numels):
        first, last = max(start, offset), min(stop, offset + numel)
        for at in range(first, last, SERIAL_NUMEL):
            pieces.append(Piece(tensor, at - offset, min(last, at + SERIAL_NUMEL) - offset))
        offset += numel
    return tuple(pieces)
