"""Local search for ``iteration`` by the closed-form bound, which is close to the step and far cheaper.

A plan is an order of devices and their numbers of layers. Each round takes the best neighbour: layers handed
from any stage to any other (those between shift), two devices or two whole stages exchanged, a stage moved,
dropped, or put in with one layer (a short stage deepens 1F1B's warm-up before a slow link).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyctl.planner.evaluate import bound_s
from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]
Shape = tuple[tuple[int, int], ...]  # (device, layers) in order


def refine(model: Model, pieces: Pieces, tries: int) -> Pieces:
    """Steepest descent from ``pieces``, which must be allowed; so is what comes back. At most ``tries``
    candidates are looked at."""
    best = bound_s(model, pieces)
    while tries > 0:
        found: tuple[float, Pieces] | None = None
        shape = tuple((p.device, p.stop - p.start) for p in pieces)
        for other in neighbours(model, shape):
            tries -= 1
            if tries < 0:
                break
            candidate = laid_out(other)
            if not model.allowed(candidate):
                continue
            cost = bound_s(model, candidate)
            if cost < best * (1 - 1e-9) and (found is None or cost < found[0]):
                found = (cost, candidate)
        if found is None:
            break
        best, pieces = found
    return pieces


def laid_out(shape: Sequence[tuple[int, int]]) -> Pieces:
    """The pieces of (device, layers) in order."""
    out = []
    start = 0
    for device, size in shape:
        out.append(Piece(device, start, start + size))
        start += size
    return tuple(out)


def neighbours(model: Model, shape: Shape) -> Iterator[Shape]:
    """All neighbours of a plan."""
    yield from _transfers(shape)
    yield from _reordered(shape)
    count = len(shape)
    idle = [d for d in range(model.devices) if all(d != used for used, _ in shape)]
    for i in range(count):
        for d in idle:
            yield (*shape[:i], (d, shape[i][1]), *shape[i + 1 :])
    if count < model.max_stages:
        for d in idle:
            for i in range(count + 1):
                giver = max(range(count), key=lambda s: (shape[s][1], -abs(s - i)))
                for g in {giver, min(i, count - 1), max(i - 1, 0)}:
                    if shape[g][1] > 1:
                        given = [*shape]
                        given[g] = (shape[g][0], shape[g][1] - 1)
                        given.insert(i, (d, 1))
                        yield tuple(given)
    if count > 1:
        for i in range(count):
            for to in {max(i - 1, 0 if i else 1), min(i + 1, count - 1)} - {i}:
                given = [*shape]
                given[to] = (shape[to][0], shape[to][1] + shape[i][1])
                del given[i]
                yield tuple(given)


def _transfers(shape: Shape) -> Iterator[Shape]:
    count = len(shape)
    for i in range(count):
        for j in range(count):
            if i == j:
                continue
            for size in (1, 2, 4, 8):
                if shape[i][1] > size:
                    given = [*shape]
                    given[i] = (shape[i][0], shape[i][1] - size)
                    given[j] = (shape[j][0], shape[j][1] + size)
                    yield tuple(given)


def _reordered(shape: Shape) -> Iterator[Shape]:
    count = len(shape)
    for i in range(count):
        for j in range(i + 1, count):
            devices = [*shape]
            devices[i] = (shape[j][0], shape[i][1])
            devices[j] = (shape[i][0], shape[j][1])
            yield tuple(devices)
            whole = [*shape]
            whole[i], whole[j] = shape[j], shape[i]
            yield tuple(whole)
    for i in range(count):
        for j in range(count):
            if abs(i - j) > 1:
                moved = [*shape[:i], *shape[i + 1 :]]
                moved.insert(j, shape[i])
                yield tuple(moved)
