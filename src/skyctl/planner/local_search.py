"""Descent from a plan to better ones next to it: layers handed over, devices exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.evaluation import step_lower_bound_s
from skyctl.planner.pipeline_depth import choose_execution

BETTER = 1e-9
"""Relative: what counts as an improvement."""


def first_improvement(
    model: CostModel,
    placement: Placement,
    value_s: float,
    candidates: Callable[[Placement], Iterable[Placement]],
    is_over: Callable[[], bool],
) -> tuple[Placement, float]:
    """Goes to the first candidate that is better, again and again: (plan, objective in seconds).

    Args:
        candidates: the plans next to a plan, those to be tried first in front.
        is_over: whether to stop; asked before each candidate.
    """
    improved = True
    while improved:
        improved = False
        for other in candidates(placement):
            if is_over():
                return placement, value_s
            if not model.is_allowed(other):
                continue
            if model.by_iteration and step_lower_bound_s(model, other) >= value_s:
                continue
            other_s = choose_execution(model, other)[0]
            if other_s < value_s * (1 - BETTER):
                placement, value_s, improved = other, other_s, True
                break
    return placement, value_s


def neighbours(placement: Placement) -> Iterator[Placement]:
    """Layers handed from any stage to any other (those between shift), and two devices exchanged."""
    count = len(placement)
    for size in (1, 2, 4, 8):
        for i in range(count):
            if placement[i].stop - placement[i].start <= size:
                continue
            for j in range(count):
                if i != j:
                    yield _hand_layers(placement, i, j, size)
    for i in range(count):
        for j in range(i + 1, count):
            other = list(placement)
            other[i] = placement[i]._replace(device=placement[j].device)
            other[j] = placement[j]._replace(device=placement[i].device)
            yield tuple(other)


def _hand_layers(placement: Placement, giver: int, taker: int, size: int) -> Placement:
    shift = -size if giver < taker else size
    low, high = min(giver, taker), max(giver, taker)
    return tuple(
        StageAssignment(
            d,
            p + shift if low < s <= high else p,
            q + shift if low <= s < high else q,
        )
        for s, (d, p, q) in enumerate(placement)
    )
