"""Which order of a ring is the fastest: every order of few replicas, else what no ring is faster than."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise, permutations

import numpy as np

from skyctl.planner.verification.route_bound import Wires

MOST_ORDERED = 9
"""Replicas of which every order is looked at: 40,320 rings of nine."""


@cache
def _orders(count: int) -> list[np.ndarray]:
    """Every ring of so many replicas that begins with the first: by place, the replica of each ring."""
    rings = np.array([(0, *rest) for rest in permutations(range(1, count))])
    return [rings[:, place] for place in range(count)]


def fastest_rings(wires: Wires, devices: Sequence[str]) -> list[tuple[str, ...]]:
    """The orders of which no other has both less seconds a byte and less latency; none of too many replicas.

    Of orders that are as fast the devices' own comes first.
    """
    count = len(devices)
    if count < 2 or count > MOST_ORDERED:
        return []
    places = _orders(count)
    sent = 2 * (count - 1) / count
    edges = [(a, b) for a in devices for b in devices]
    line_s = np.array([wires.link_s.get(edge, 0.0) for edge in edges])
    hop_s = np.array([wires.latency_s.get(edge, 0.0) for edge in edges])
    taken = [a * count + b for a, b in pairwise([*places, places[0]])]
    byte_s = np.max([line_s[edge] for edge in taken], axis=0)
    for number, shared_s in enumerate(wires.shared_s):
        uses = np.array([number in wires.over.get(edge, ()) for edge in edges])
        if uses.any():
            byte_s = np.maximum(byte_s, shared_s * np.sum([uses[edge] for edge in taken], axis=0))
    hops = [hop_s[edge] for edge in taken]
    saved_s = np.min([hops[place - 1] + hops[place] for place in range(count)], axis=0)
    columns = np.round(
        np.stack([sent * byte_s, 2 * np.sum(hops, axis=0) - saved_s]) / _scale(line_s, hop_s), 12
    )
    kept: list[int] = []
    for ring in np.lexsort((columns[1], columns[0])).tolist():
        if not kept or columns[1][ring] < columns[1][kept[-1]]:
            kept.append(ring)
    return [tuple(devices[place[ring]] for place in places) for ring in kept]


def _scale(line_s: np.ndarray, hop_s: np.ndarray) -> np.ndarray:
    """The divisors of both columns, so that rounding takes off their last digits only."""
    return np.array([[line_s.max() or 1.0], [hop_s.max() or 1.0]])


def least_of_rings(wires: Wires, devices: Sequence[str]) -> tuple[float, float]:
    """Seconds a byte and seconds of latency that no ring is below: each uses a line out and one in."""
    lines, hops = [], []
    for out in (True, False):
        each = [[(d, x) if out else (x, d) for x in devices if x != d] for d in devices]
        lines.append(max(min(wires.line_s(edge) for edge in edges) for edges in each))
        hops.append(sum(min(wires.latency_s.get(edge, 0.0) for edge in edges) for edges in each))
    part = 2 * (len(devices) - 1) / len(devices)
    return part * max(lines), part * max(hops)
