"""From a balanced choice of edges between kinds of boundaries to a plan: an Eulerian trail, shortened."""

from __future__ import annotations

from typing import NamedTuple

from skyctl.planner.verification.problem_data import ProblemData


class BoundaryEdge(NamedTuple):
    """A device's range: from one kind of boundary to another, so many layers at most."""

    device: int
    source: int
    target: int
    length: int


def plan_from(
    facts: ProblemData, period: int, edges: list[BoundaryEdge], below_s: float
) -> list[tuple[int, int, int]] | None:
    """(device, start, stop) in order, all within time, memory and pins; None where the edges do not make one.

    Kinds below ``period`` are phases: an edge with one at an end may be shortened by whole periods.
    """
    first = next((edge.source for edge in edges if edge.source not in {e.target for e in edges}), None)
    if first is None:
        first = 0
    order = _trail(edges, first)
    if order is None:
        return None
    spare = sum(edge.length for edge in order) - facts.layers
    if spare < 0 or spare % period:
        return None
    lengths = []
    for edge in order:
        free = (edge.length - 1) // period if min(edge.source, edge.target) < period else 0
        cut = min(spare // period, free) * period
        spare -= cut
        lengths.append(edge.length - cut)
    if spare:
        return None
    out = []
    at = 0
    for edge, length in zip(order, lengths, strict=True):
        out.append((edge.device, at, at + length))
        at += length
    return out if allowed(facts, out, below_s) else None


def _trail(edges: list[BoundaryEdge], first: int) -> list[BoundaryEdge] | None:
    """All edges, each once, one after the other (Hierholzer); None where they are not connected."""
    free: dict[int, list[BoundaryEdge]] = {}
    for edge in edges:
        free.setdefault(edge.source, []).append(edge)
    path: list[BoundaryEdge] = []
    stack: list[tuple[int, BoundaryEdge | None]] = [(first, None)]
    while stack:
        at, came = stack[-1]
        if free.get(at):
            edge = free[at].pop()
            stack.append((edge.target, edge))
        else:
            stack.pop()
            if came is not None:
                path.append(came)
    return path[::-1] if len(path) == len(edges) else None


def allowed(facts: ProblemData, plan: list[tuple[int, int, int]], below_s: float) -> bool:
    """Whether every stage takes less than ``below_s``, fits in its place, and the pins hold."""
    if not facts.may_be_first(plan[0][0]) or not facts.may_be_last(plan[-1][0]):
        return False
    for s, (device, start, stop) in enumerate(plan):
        if float(facts.seconds(device)[start:stop].sum()) >= below_s:
            return False
        if facts.need_bytes(start, stop, facts.least_in_flight(len(plan) - s)) > facts.room[device]:
            return False
    return True
