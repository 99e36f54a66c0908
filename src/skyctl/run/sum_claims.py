"""The ranks that are wrong if those that hold the same layers say different things of what they sum. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyctl.records.problem import Problem
from skyctl.run.rank_spec import RankSpec
from skyctl.worker.rank_events import SumSizes

FLOAT32_BYTES = 4
Claims = Mapping[int, SumSizes | None]
"""By rank, what it says that it sums; None: nothing."""


def planned_numels(problem: Problem) -> tuple[int, ...] | None:
    """How many numbers each layer's gradients have, the last layer first; None: the problem does not say.

    Nor does it where layers share parameters: each is summed once, and counted with every layer that has it.
    """
    counted = [layer.gradient_bytes for layer in reversed(problem.layers) if layer.gradient_bytes is not None]
    if problem.ties or len(counted) < len(problem.layers):
        return None
    return tuple(round(size / FLOAT32_BYTES) for size in counted)


def wrong_ranks(claims: Claims, specs: Sequence[RankSpec]) -> list[int]:
    """The ranks whose word is wrong; none where nobody can tell.

    The plan says how many numbers each layer has. Of the rest it knows nothing: there the word of more than
    half of the nodes counts, so that one that lies drives no honest one out.

    Args:
        specs: of these ranks, at least; by rank.
    """
    as_planned = {
        rank: claim is not None and claim.layers == specs[rank].summed_numels
        for rank, claim in claims.items()
    }
    if any(as_planned.values()) and not all(as_planned.values()):
        return [rank for rank, fits in as_planned.items() if not fits]
    votes: dict[SumSizes | None, set[str]] = {}
    for rank, claim in claims.items():
        votes.setdefault(claim, set()).add(specs[rank].node)
    nodes = set().union(*votes.values())
    believed = [claim for claim, voters in votes.items() if 2 * len(voters) > len(nodes)]
    return [rank for rank, claim in claims.items() if claim not in believed] if len(believed) == 1 else []


def describe_claim(claim: SumSizes | None) -> str:
    """A rank's claim of how many numbers it sums, in words for an error message."""
    if claim is None:
        return "nothing"
    return (
        f"{sum(claim.layers)} numbers of {len(claim.layers)} layers and {claim.parameters} parameters, "
        f"{claim.figures} running figures"
    )
