"""Shapes of pipelines for the round-trip bound: numbers of stages, and where links are slow.

If devices fall into clusters, a plan's crossings are its boundaries between two of them. A set of shapes
is all plans with so many stages and between so many crossings, wherever these are: one relaxed shape covers
it, with what its boundaries cost at least and at most. Sets are halved, down to one number of crossings;
those with fewer crossings than clusters are listed: every order of clusters and number of devices in each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from skyctl.planner.iteration.round_trip_tables import CostRange, LinkClusters

MAX_SHAPES = 6000
"""Orders of clusters with numbers of devices, beyond which a set is not listed."""


@dataclass(frozen=True)
class PipelineShape:
    """How many stages a plan has, and in which cluster each is.

    Attributes:
        segments: (cluster, stages) in order; empty: any devices.
        links: by boundary, the range of its cost.
        least_s: the least cost of all boundaries together.
        room: by stage, the most seconds of all boundaries before it, the least and the most of all after it.
    """

    segments: tuple[tuple[int, int], ...]
    links: tuple[CostRange, ...]
    least_s: float
    room: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]

    @property
    def stages(self) -> int:
        """How many stages plans of this shape have."""
        return len(self.links) + 1


class ShapeSet(NamedTuple):
    """All plans of ``stages`` stages with ``least`` to ``most`` crossings between clusters."""

    stages: int
    least: int
    most: int


class PipelineShapes:
    """The sets of shapes of one problem."""

    def __init__(
        self, clusters: LinkClusters, most_stages: int, keep_deadline: Callable[[], None] = lambda: None
    ) -> None:
        """``keep_deadline``: asked again and again while shapes are listed; ends by an error of its own."""
        self.clusters = clusters
        self.most_stages = most_stages
        self._keep_deadline = keep_deadline

    def by_stages(self) -> list[ShapeSet]:
        """All plans, one set for each number of stages, the largest number first."""
        crossed = len(self.clusters.members) > 1
        return [ShapeSet(n, 0, n - 1 if crossed else 0) for n in range(self.most_stages, 0, -1)]

    def halves(self, whole: ShapeSet) -> tuple[ShapeSet, ShapeSet]:
        """A set's plans with fewer and with more crossings; what can be listed is parted from the rest."""
        few = len(self.clusters.members) - 1
        middle = few if whole.least <= few < whole.most else (whole.least + whole.most) // 2
        return whole._replace(most=middle), whole._replace(least=middle + 1)

    def relaxed(self, whole: ShapeSet) -> PipelineShape:
        """The shape that covers a set, wherever its crossings are."""
        (near_low, near), (far_low, far) = self.clusters.inside(), self.clusters.across()
        if whole.most:
            near_low, far = min(near_low, far_low), max(near, far)
        boundaries = whole.stages - 1

        def most(n: int) -> float:
            return min(n, whole.most) * far + max(0, n - whole.most) * near

        def least(n: int) -> float:
            sure = max(0, whole.least - (boundaries - n))
            return sure * far_low + (n - sure) * near_low

        room = (
            tuple(most(s) for s in range(whole.stages)),
            tuple(least(boundaries - s) for s in range(whole.stages)),
            tuple(most(boundaries - s) for s in range(whole.stages)),
        )
        total = max(least(boundaries), self.clusters.least_anywhere[boundaries])
        links = ((near_low, far if whole.most else near),) * boundaries
        return PipelineShape((), links, total, room)

    def ordered(self, whole: ShapeSet) -> list[PipelineShape] | None:
        """The shapes of a set with one number of crossings, those with the same links one after the other.

        None: there are too many, or as many crossings as clusters.
        """
        if whole.most >= len(self.clusters.members):
            return None
        listed = list(itertools.islice(self._orders(whole.stages, whole.most + 1), MAX_SHAPES))
        return sorted(listed, key=lambda shape: shape.links) if len(listed) < MAX_SHAPES else None

    def _orders(self, stages: int, count: int) -> Iterator[PipelineShape]:
        """The shapes of all orders of that many clusters and numbers of devices in each."""
        members, between = self.clusters.members, self.clusters.between
        for order in itertools.product(range(len(members)), repeat=count):
            if any(g == h for g, h in itertools.pairwise(order)):
                continue
            for sizes in _compositions(stages, [len(members[g]) for g in order]):
                self._keep_deadline()
                held = dict.fromkeys(order, 0)
                for g, size in zip(order, sizes, strict=True):
                    held[g] += size
                if any(size > len(members[g]) for g, size in held.items()):
                    continue
                links: list[CostRange] = []
                for i, (g, size) in enumerate(zip(order, sizes, strict=True)):
                    links += [between[g, g]] * (size - 1)
                    if i + 1 < count:
                        links.append(between[g, order[i + 1]])
                yield _shape_of(
                    tuple(zip(order, sizes, strict=True)), tuple(links), self._least(order, sizes)
                )

    def _least(self, order: tuple[int, ...], sizes: tuple[int, ...]) -> float:
        inside = sum(self.clusters.least[g][size - 1] for g, size in zip(order, sizes, strict=True))
        return inside + sum(self.clusters.between[g, h][0] for g, h in itertools.pairwise(order))


def _shape_of(
    segments: tuple[tuple[int, int], ...], links: tuple[CostRange, ...], least_s: float
) -> PipelineShape:
    """A shape whose boundaries all have a known position."""
    low, high = ([0.0, *itertools.accumulate(x[i] for x in links)] for i in (0, 1))
    room = (tuple(high), tuple(low[-1] - x for x in low), tuple(high[-1] - x for x in high))
    return PipelineShape(segments, links, least_s, room)


def _compositions(total: int, most: list[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as a sum of ordered parts, each at least 1 and at most its limit."""
    if len(most) == 1:
        if 1 <= total <= most[0]:
            yield (total,)
        return
    for part in range(max(1, total - sum(most[1:])), min(most[0], total - len(most) + 1) + 1):
        for rest in _compositions(total - part, most[1:]):
            yield (part, *rest)
