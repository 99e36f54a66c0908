"""A candidate plan of any parallelism: pipelines over disjoint devices, and how they sum what they share.

One pipeline, several, or several of one stage each are one thing here. Devices are indices in the problem's
order; ranges of layers are half-open.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from skyctl.planner.cost_model import Placement
from skyctl.planner.evaluation import StageExecution
from skyctl.planner.routes.route_layouts import Layout, RouteUse


class PlannedPipeline(NamedTuple):
    """One pipeline: its stages, how they run, and its microbatches of a step.

    ``local_steps``: those of a round, which it makes by itself; None: as many as the problem asks for.
    """

    placement: Placement
    execution: StageExecution
    microbatches: int
    local_steps: int | None = None


class GroupRoutes(NamedTuple):
    """Over which routes the replicas of some layers sum.

    Attributes:
        layout: the routes; those of a plan's record count as trees, whatever they are.
        byte_s: seconds that a byte of gradient takes on what is busiest: a link, a shared resource, a helper.
        loads: by link (a pair), shared resource (a number) and helper (a device twice), seconds that a byte
            of gradient takes there.
    """

    layout: Layout
    use: RouteUse
    byte_s: float
    loads: tuple[tuple[Hashable, float], ...]


class SumGroup(NamedTuple):
    """Layers [start, stop) that the same devices hold, one of each pipeline, and how they are summed.

    Attributes:
        replicas: ascending.
        size_bytes: of these layers, as they are sent.
        chunk_bytes: of a message, at most.
        fill_s: what messages take beyond their bytes, which pass deep trees edge by edge.
    """

    start: int
    stop: int
    replicas: tuple[int, ...]
    size_bytes: float
    routed: GroupRoutes
    chunk_bytes: int
    fill_s: float = 0.0


class Candidate(NamedTuple):
    """Pipelines over disjoint devices, and the sums of their gradients, or of their weights in rounds.

    ``sums``: by ranges of layers that the same devices hold, in the layers' order; none of one pipeline.
    """

    pipelines: tuple[PlannedPipeline, ...]
    sums: tuple[SumGroup, ...] = ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """By pipeline, its stages."""
        return tuple(pipeline.placement for pipeline in self.pipelines)

    @property
    def shares(self) -> tuple[int, ...]:
        """By pipeline, its microbatches of a step."""
        return tuple(pipeline.microbatches for pipeline in self.pipelines)


class TimeScale(NamedTuple):
    """The factors of times: of a device's layers and its work on gradients, of a link's seconds."""

    device: Callable[[int], float]
    link: Callable[[tuple[int, int]], float]


AS_MEASURED = TimeScale(lambda _device: 1.0, lambda _pair: 1.0)
"""Times as the problem has them."""


def layer_groups(placements: Sequence[Placement]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(start, stop, replicas ascending) of the largest ranges of layers that the same devices hold."""
    if len(placements) == 1:
        return [(p, q, (d,)) for d, p, q in placements[0]]
    cuts = sorted({0, *(stage.stop for placement in placements for stage in placement)})
    at = [0] * len(placements)
    out = []
    for start, stop in pairwise(cuts):
        for i, placement in enumerate(placements):
            if placement[at[i]].stop <= start:
                at[i] += 1
        replicas = (placement[k].device for placement, k in zip(placements, at, strict=True))
        out.append((start, stop, tuple(sorted(replicas))))
    return out


def arriving_edges(groups: Iterable[SumGroup]) -> dict[int, int]:
    """By device, the edges of all groups' routes that arrive at it with partial sums."""
    out: dict[int, int] = {}
    for group in groups:
        for d, count in group.routed.use.children.items():
            out[d] = out.get(d, 0) + count
    return out
