"""Every rank's clock as the first rank's: what neighbours found out about each other, chained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Aligned:
    """One rank's clock. ``error_s``: how far a time turned into the first rank's may be off.

    ``points``: for each rank on the way to the first, (own time, how far that rank's clock is ahead) at the
    start and at the end of the run.
    """

    points: tuple[tuple[tuple[float, float], ...], ...] = ()
    error_s: float = 0.0

    def to_first(self, at_s: float) -> float:
        """That moment on the first rank's clock. Clocks drift apart steadily, as far as is known."""
        for known in self.points:
            at_s += _between(known, at_s)
        return at_s


def align(readings: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[Aligned]:
    """One clock a rank.

    Args:
        readings: by rank, what ``transport.clocks`` gave for the rank before it: ``start`` and ``end``, each
            with ``at_s``, ``offset_s`` and ``error_s``; empty on the first rank.
    """
    out: list[Aligned] = []
    for rank, known in enumerate(readings):
        if not rank:
            out.append(Aligned())
            continue
        points = tuple(sorted((float(r["at_s"]), float(r["offset_s"])) for r in known.values()))
        error_s = max((float(r["error_s"]) for r in known.values()), default=0.0)
        before = out[-1]
        out.append(Aligned((points, *before.points), before.error_s + error_s))
    return out


def _between(points: tuple[tuple[float, float], ...], at_s: float) -> float:
    """The offset at that time: on the line through the first and the last point."""
    if not points:
        return 0.0
    (first_s, first), (last_s, last) = points[0], points[-1]
    if last_s <= first_s:
        return first
    return first + (last - first) * (at_s - first_s) / (last_s - first_s)
