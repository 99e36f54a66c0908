"""Which consecutive layers are run together to time those of them that are still to be timed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LENGTH = 4
"""Layers, where they fit: a call's own cost is then shared as in a stage."""

LENGTH_BYTES = 128 << 20
IN_FLIGHT = 4
IN_FLIGHT_BYTES = 256 << 20
"""Above these, a layer's own values fill the caches, and its company makes no difference."""


@dataclass(frozen=True)
class Window:
    """Layers [start, stop) of the workload; ``kinds`` are their tasks."""

    start: int
    stop: int
    kinds: tuple[int, ...]
    in_flight: int = 1


def windows(
    kinds: Sequence[int],
    wanted: Sequence[tuple[int, int]],
    needs: Sequence[float],
    alone: Collection[int],
    room_bytes: float,
) -> list[Window]:
    """Windows in which every kind wanted occurs.

    Args:
        kinds: each layer's kind.
        wanted: (kind, the first layer of it).
        needs: by kind, bytes that running one takes.
        alone: kinds that are not run together with others.
        room_bytes: what a window may take in all.
    """
    found: list[Window] = []
    covered: set[int] = set()
    for kind, first in wanted:
        if kind not in covered:
            found.append(_around(kinds, first, needs, alone, room_bytes))
            covered.update(found[-1].kinds)
    return found


def _around(
    kinds: Sequence[int], first: int, needs: Sequence[float], alone: Collection[int], room_bytes: float
) -> Window:
    """From that layer on, and at the model's end also before it, as far as the room goes."""
    start, stop, sum_bytes = first, first + 1, needs[kinds[first]]
    most_bytes = 0.0 if kinds[first] in alone else min(LENGTH_BYTES, room_bytes)
    after = range(first + 1, min(len(kinds), first + LENGTH))
    before = range(first - 1, max(-1, first - LENGTH), -1)
    for index in (*after, *before):
        further = sum_bytes + needs[kinds[index]]
        if stop - start == LENGTH or index not in (start - 1, stop):
            continue
        if kinds[index] in alone or further > most_bytes:
            continue
        start, stop, sum_bytes = min(start, index), max(stop, index + 1), further
    in_flight = int(min(IN_FLIGHT_BYTES, room_bytes) // max(1.0, sum_bytes)) if most_bytes else 1
    return Window(start, stop, tuple(kinds[start:stop]), max(1, min(IN_FLIGHT, in_flight)))


def singly(window: Window) -> list[Window]:
    """Its layers, one at a time, each kind once."""
    first = {kind: window.start + at for at, kind in reversed(list(enumerate(window.kinds)))}
    return [Window(index, index + 1, (kind,)) for kind, index in sorted(first.items(), key=lambda kv: kv[1])]
