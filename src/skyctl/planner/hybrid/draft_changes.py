"""Drafts next to one: other shares, other cuts, devices exchanged, moved, left out and added."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from skyctl.planner.cost_model import Placement, StageAssignment
from skyctl.planner.hybrid.hybrid_model import Draft, HybridModel
from skyctl.planner.local_search import neighbours

SHARE_STEPS = (1, 2, 4, 8)
"""Microbatches that go from one pipeline to another."""

CUT_STEPS = (-2, -1, 1, 2)
"""Layers that a cut moves by which several pipelines have."""

MOST_MOVED_EVERYWHERE = 24
"""Stages up to which a device is moved to every other place, and not to one drawn for it."""


def changed_drafts(model: HybridModel, draft: Draft, drawn: random.Random) -> Iterator[Draft]:
    """All of them, but of many stages some; they may not fit."""
    placements, shares = draft
    yield from (Draft(placements, other) for other in _other_shares(shares))
    yield from (Draft(other, shares) for other in _cut_alike(placements))
    for i, placement in enumerate(placements):
        others = [*neighbours(placement), *(shorter for _, shorter in _without_stage(placement))]
        yield from (Draft(_with(placements, (i, other)), shares) for other in others)
    yield from (Draft(other, shares) for other in _exchanged(placements))
    yield from (Draft(other, shares) for other in _moved(placements, drawn))
    used = {stage.device for placement in placements for stage in placement}
    for device in range(model.devices):
        if device in used:
            continue
        for i, placement in enumerate(placements):
            for s, stage in enumerate(placement):
                other = (*placement[:s], stage._replace(device=device), *placement[s + 1 :])
                yield Draft(_with(placements, (i, other)), shares)
            for other in _with_device(placement, device):
                yield Draft(_with(placements, (i, other)), shares)


def _with(placements: tuple[Placement, ...], *changes: tuple[int, Placement]) -> tuple[Placement, ...]:
    out = list(placements)
    for i, placement in changes:
        out[i] = placement
    return tuple(out)


def _other_shares(shares: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i in range(len(shares)):
        for j in range(len(shares)):
            for step in SHARE_STEPS:
                if i != j and shares[i] > step:
                    changed = list(shares)
                    changed[i] -= step
                    changed[j] += step
                    yield tuple(changed)


def _cut_alike(placements: tuple[Placement, ...]) -> Iterator[tuple[Placement, ...]]:
    """A cut that several pipelines have, moved in all of them, so that they still sum stage by stage."""
    cuts = Counter(stage.stop for placement in placements for stage in placement[:-1])
    for cut in sorted(cut for cut, count in cuts.items() if count > 1):
        for step in CUT_STEPS:
            moved = tuple(_cut_moved(placement, cut, cut + step) for placement in placements)
            if all(stage.start < stage.stop for placement in moved for stage in placement):
                yield moved


def _cut_moved(placement: Placement, cut: int, to: int) -> Placement:
    return tuple(
        StageAssignment(d, to if start == cut else start, to if stop == cut else stop)
        for d, start, stop in placement
    )


def _exchanged(placements: tuple[Placement, ...]) -> Iterator[tuple[Placement, ...]]:
    """Two devices of different pipelines in each other's place."""
    for i, j in combinations(range(len(placements)), 2):
        for s, a in enumerate(placements[i]):
            for t, b in enumerate(placements[j]):
                mine = (*placements[i][:s], a._replace(device=b.device), *placements[i][s + 1 :])
                theirs = (*placements[j][:t], b._replace(device=a.device), *placements[j][t + 1 :])
                yield _with(placements, (i, mine), (j, theirs))


def _moved(placements: tuple[Placement, ...], drawn: random.Random) -> Iterator[tuple[Placement, ...]]:
    """A device of one pipeline in another, its layers given to a neighbour."""
    places = [(j, t) for j, other in enumerate(placements) for t in range(len(other))]
    for i, placement in enumerate(placements):
        for device, shorter in _without_stage(placement):
            chosen = places if len(places) <= MOST_MOVED_EVERYWHERE else [drawn.choice(places)]
            for j, t in chosen:
                if i != j:
                    for longer in _with_device_at(placements[j], t, device):
                        yield _with(placements, (i, shorter), (j, longer))


def _without_stage(placement: Placement) -> Iterator[tuple[int, Placement]]:
    """Each device left out, its layers given to the stage before or after it."""
    for s, (device, start, stop) in enumerate(placement):
        if s:
            before = placement[s - 1]._replace(stop=stop)
            yield device, (*placement[: s - 1], before, *placement[s + 1 :])
        if s + 1 < len(placement):
            after = placement[s + 1]._replace(start=start)
            yield device, (*placement[:s], after, *placement[s + 2 :])


def _with_device(placement: Placement, device: int) -> Iterator[Placement]:
    """The device beside each stage."""
    for s in range(len(placement)):
        yield from _with_device_at(placement, s, device)


def _with_device_at(placement: Placement, s: int, device: int) -> Iterator[Placement]:
    """The device with one layer, a half and all but one of a stage's, before or after the rest."""
    replica, start, stop = placement[s]
    for size in sorted({1, (stop - start) // 2, stop - start - 1} - {0}):
        if stop - start > size:
            first = StageAssignment(device, start, start + size), StageAssignment(replica, start + size, stop)
            last = StageAssignment(replica, start, stop - size), StageAssignment(device, stop - size, stop)
            yield (*placement[:s], *first, *placement[s + 1 :])
            yield (*placement[:s], *last, *placement[s + 1 :])
