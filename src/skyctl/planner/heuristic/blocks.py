"""Other orders of the same blocks: stages between two slow boundaries stay together.

Where devices stand in sites with slow links between, single moves hardly ever lead from one good order of
the sites to another; so a search begins from several.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]


def reordered(model: Model, pieces: Pieces, number: int, rng: np.random.Generator) -> list[Pieces]:
    """At most ``number`` allowed plans: the given one, and ones with its blocks in other orders, some
    reversed. Only the given one where no boundaries are much slower than the others."""
    blocks = _blocks(model, pieces)
    out = [pieces]
    if len(blocks) < 2:
        return out
    for _ in range(4 * number):
        if len(out) >= number:
            break
        order = [blocks[i] for i in rng.permutation(len(blocks))]
        turned = [block[::-1] if rng.random() < 0.5 else block for block in order]
        plan = _laid_out([piece for block in turned for piece in block])
        if plan not in out and model.allowed(plan):
            out.append(plan)
    return out


def _blocks(model: Model, pieces: Pieces) -> list[Pieces]:
    seconds = []
    for a, b in pairwise(pieces):
        ways = (model.occupancy_s(a.device, b.device, a.stop), model.occupancy_s(b.device, a.device, a.stop))
        seconds.append(sum(busy + latency for busy, latency in ways))
    slow = [i + 1 for i, x in enumerate(seconds) if 2 * x > max(seconds) > 0]
    if 2 * len(slow) > len(seconds):
        return [pieces]
    cuts = [0, *slow, len(pieces)]
    return [pieces[p:q] for p, q in pairwise(cuts)]


def _laid_out(pieces: Sequence[Piece]) -> Pieces:
    """The same devices and numbers of layers, one after the other."""
    out = []
    start = 0
    for device, p, q in pieces:
        out.append(Piece(device, start, start + q - p))
        start += q - p
    return tuple(out)
