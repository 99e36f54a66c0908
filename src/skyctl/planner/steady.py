"""Depth to spare: microbatches in flight that cost no time, for links that are at times slower than measured.

The least depth that keeps a step as short as it can be leaves nothing for a message that comes late: the
stage before has no forward left to do meanwhile. So the plan that is handed out is also played with slower
links, and where memory allows it the stages before the last get a few microbatches more, as far as that
shortens the slower step and does not lengthen the one that was planned.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.planner.evaluate import step_s
from skyctl.planner.model import Model, Piece
from skyctl.planner.running import Running
from skyctl.records.problem import Problem

SLOWER = 1.25
"""How many times longer messages take: bandwidth, latency and what is shared."""
MOST = 4
"""Microbatches more, at most."""
WORTH = 2e-3
"""Relative: so much shorter must the slower step be for one more."""
ROUNDING = 1e-12


def steadied(model: Model, pieces: Sequence[Piece], value: float, running: Running) -> tuple[float, Running]:
    """(the step, how the stages run) with depth to spare, or as given.

    Args:
        value: the planned step; the one returned is no longer.
    """
    linked = model.problem.links or model.problem.shared
    if not (model.eager and model.by_iteration and linked and len(pieces) > 1):
        return value, running
    slower = Model(_with_slower_links(model.problem))
    best = running
    late_s = step_s(slower, pieces, running)
    for more in range(1, MOST + 1):
        deeper = _deeper(model, pieces, running, more)
        if deeper == best or step_s(model, pieces, deeper) > value * (1 + ROUNDING):
            break
        deeper_s = step_s(slower, pieces, deeper)
        if deeper_s > late_s * (1 - WORTH):
            continue
        best, late_s = deeper, deeper_s
    return step_s(model, pieces, best), best


def _deeper(model: Model, pieces: Sequence[Piece], running: Running, more: int) -> Running:
    """All stages but the last that much deeper, as far as memory and the number of microbatches allow."""
    flying: list[int] = []
    for (d, p, q), k, behind, again in zip(pieces, *running, strict=True):
        last = len(flying) + 1 == len(pieces)
        number = k if last else min(k + more, model.microbatches)
        while number > k and not model.fits(d, p, q, number, behind, again):
            number -= 1
        flying.append(min(number, flying[-1]) if flying else number)
    return running._replace(flying=tuple(flying))


def _with_slower_links(problem: Problem) -> Problem:
    links = (
        link.model_copy(
            update={
                "latency_s": link.latency_s * SLOWER,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s / SLOWER,
            }
        )
        for link in problem.links
    )
    shared = (
        one.model_copy(update={"bandwidth_bytes_per_s": one.bandwidth_bytes_per_s / SLOWER})
        for one in problem.shared
    )
    return problem.model_copy(update={"links": tuple(links), "shared": tuple(shared)})
