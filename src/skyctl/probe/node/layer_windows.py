"""Windows: which consecutive layers are run together to time those of them that are still to be timed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

MOST_LAYERS = 4
"""Layers, where they fit: a call's own cost is then shared as in a stage."""

MOST_WINDOW_BYTES = 128 << 20
MOST_IN_FLIGHT = 4
MOST_IN_FLIGHT_BYTES = 256 << 20
"""Above these, a layer's own values fill the caches, and its company makes no difference."""


@dataclass(frozen=True)
class LayerWindow:
    """Layers [start, stop) of the workload. ``kinds``: by layer, the position of the distinct layer it is."""

    start: int
    stop: int
    kinds: tuple[int, ...]
    in_flight: int = 1


def choose_windows(
    kinds: Sequence[int],
    wanted: Sequence[tuple[int, int]],
    needs: Sequence[float],
    alone: Collection[int],
    room_bytes: float,
) -> list[LayerWindow]:
    """Windows in which every kind wanted occurs.

    Args:
        kinds: each layer's kind.
        wanted: (kind, index of the first layer of it).
        needs: by kind, bytes that running one takes.
        alone: kinds that are not run together with others.
        room_bytes: what a window may take in all.
    """
    found: list[LayerWindow] = []
    covered: set[int] = set()
    for kind, first in wanted:
        if kind not in covered:
            found.append(_window_around(kinds, first, needs, alone, room_bytes))
            covered.update(found[-1].kinds)
    return found


def _window_around(
    kinds: Sequence[int], first: int, needs: Sequence[float], alone: Collection[int], room_bytes: float
) -> LayerWindow:
    """The largest window from ``first`` on that fits ``room_bytes``; at the model's end also before it."""
    start, stop, sum_bytes = first, first + 1, needs[kinds[first]]
    most_bytes = 0.0 if kinds[first] in alone else min(MOST_WINDOW_BYTES, room_bytes)
    after = range(first + 1, min(len(kinds), first + MOST_LAYERS))
    before = range(first - 1, max(-1, first - MOST_LAYERS), -1)
    for index in (*after, *before):
        further = sum_bytes + needs[kinds[index]]
        if stop - start == MOST_LAYERS or index not in (start - 1, stop):
            continue
        if kinds[index] in alone or further > most_bytes:
            continue
        start, stop, sum_bytes = min(start, index), max(stop, index + 1), further
    in_flight = int(min(MOST_IN_FLIGHT_BYTES, room_bytes) // max(1.0, sum_bytes)) if most_bytes else 1
    return LayerWindow(start, stop, tuple(kinds[start:stop]), max(1, min(MOST_IN_FLIGHT, in_flight)))


def single_layer_windows(window: LayerWindow) -> list[LayerWindow]:
    """Windows of one layer each, one for every kind in that window."""
    first = {kind: window.start + at for at, kind in reversed(list(enumerate(window.kinds)))}
    return [
        LayerWindow(index, index + 1, (kind,)) for kind, index in sorted(first.items(), key=lambda kv: kv[1])
    ]


@dataclass(frozen=True)
class DistinctLayer:
    """One distinct layer, the first of its kind, at the microbatch sizes to measure.

    ``signatures`` and ``needs_bytes`` (what running it takes) are by microbatch size. ``known``: sizes at
    which it is only run as company for others.
    """

    index: int
    name: str
    signatures: dict[int, str]
    needs_bytes: dict[int, float]
    known: frozenset[int] = frozenset()

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DistinctLayer:
        """From the launcher's JSON, whose keys are strings."""
        signatures = {int(size): str(signature) for size, signature in raw["signatures"].items()}
        needs = {int(size): float(needed) for size, needed in raw["needs_bytes"].items()}
        known = frozenset(int(size) for size in raw.get("known", ()))
        return cls(int(raw["index"]), str(raw["name"]), signatures, needs, known)
