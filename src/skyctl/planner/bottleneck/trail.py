"""From edges to a plan: one trail through all of them (Hierholzer 1873), then stages shortened to fit."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from skyctl.planner.bottleneck.balance import Choice
from skyctl.planner.bottleneck.reach import Ints
from skyctl.planner.bottleneck.repeats import Edges
from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]
Stage = tuple[int, int]
"""(device, edge)."""


def laid_out(model: Model, edges: Edges, choice: Choice, lengths: Ints) -> Pieces | None:
    """A plan of the chosen edges; None: they do not connect, or can't be shortened to the model's layers.

    Args:
        choice: per device its edge, or −1.
        lengths: [device, edge] the longest.
    """
    stages = _connected(edges, choice, lengths)
    if stages is None:
        return None
    order = _trail(model, edges, stages)
    if order is None:
        return None
    sizes = _sizes(model, edges, order, lengths)
    if sizes is None:
        return None
    pieces = []
    start = 0
    for (d, _), size in zip(order, sizes, strict=True):
        if size:
            pieces.append(Piece(d, start, start + size))
            start += size
    return tuple(pieces)


def _connected(edges: Edges, choice: Choice, lengths: Ints) -> list[Stage] | None:
    """The edges without those between phases that the trail does not touch; a stage that starts and ends in
    the same phase may do so in any that it does touch."""
    stages = [(d, e) for d, e in enumerate(choice) if e >= 0]
    links = [(edges.edges[e].source, edges.edges[e].target) for _, e in stages]
    seen = {edges.source}
    grown = True
    while grown:
        near = {b for a, b in links if a in seen} | {a for a, b in links if b in seen}
        grown = not near <= seen
        seen |= near
    loops = [e for e, x in enumerate(edges.edges) if x.source == x.target and x.source in seen]
    out: list[Stage] = []
    for (d, e), (a, b) in zip(stages, links, strict=True):
        if a == b and loops:
            e = max(loops, key=lambda loop: int(lengths[d, loop]))  # noqa: PLW2901
        if edges.edges[e].source in seen and lengths[d, e] > 0:
            out.append((d, e))
    return out if sum(int(lengths[d, e]) for d, e in out) >= edges.model.layers else None


def _trail(model: Model, edges: Edges, stages: Sequence[Stage]) -> list[Stage] | None:
    """All edges one after the other, from the source to the sink; roomy devices first where there is a
    choice, for 1F1B keeps more in flight there."""
    ways: dict[int, list[Stage]] = {}
    for d, e in sorted(stages, key=lambda stage: (-min(model.available[stage[0]], 1e300), stage)):
        ways.setdefault(edges.edges[e].source, []).append((d, e))
    path: list[Stage] = []
    stack: list[tuple[int, Stage | None]] = [(edges.source, None)]
    while stack:
        node, by = stack[-1]
        if ways.get(node):
            d, e = ways[node].pop(0)
            stack.append((edges.edges[e].target, (d, e)))
        else:
            stack.pop()
            if by is not None:
                path.append(by)
    path.reverse()
    node = edges.source
    for _, e in path:
        if edges.edges[e].source != node:
            return None
        node = edges.edges[e].target
    return path if len(path) == len(stages) and node == edges.sink else None


def _sizes(model: Model, edges: Edges, order: Sequence[Stage], lengths: Ints) -> list[int] | None:
    """Numbers of layers, in all the model's: the slowest stage is made a period shorter until it fits."""
    period = edges.run.period
    sizes = [int(lengths[stage]) for stage in order]
    least = [0 if edges.edges[e].source == edges.edges[e].target else edges.edges[e].least for _, e in order]
    reach = edges.reach
    row = {d: i for i, group in enumerate(reach.members) for d in group}
    means = [reach.work[reach.kind[row[d]], -1] / model.layers for d, _ in order]
    excess = sum(sizes) - model.layers
    heap = [(-sizes[i] * means[i], i) for i in range(len(order)) if sizes[i] - period >= least[i]]
    heapq.heapify(heap)
    while excess >= period and heap:
        i = heapq.heappop(heap)[1]
        sizes[i] -= period
        excess -= period
        if sizes[i] - period >= least[i]:
            heapq.heappush(heap, (-sizes[i] * means[i], i))
    return sizes if excess == 0 else None
