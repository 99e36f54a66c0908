"""The generation that follows from what those that are left have said of themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from skyctl.worker.elastic.microbatch_shares import deal, even_shares, hand_out, numbers_in
from skyctl.worker.member_messages import Digests, Generation, Promise, Ranges


def next_generation(
    number: int,
    promises: Mapping[int, Promise],
    microbatches: int,
    pipelines: Mapping[int, int],
    joining: Mapping[int, float | None],
) -> Generation:
    """The generation of those that have promised, with what each has said of itself, and of those that join.

    Pipelines that have left made some of the step's microbatches, and those that are not at it yet have none;
    where its sum is to be made again, these go to whichever pipeline has least left to do.

    Args:
        number: the generation's.
        promises: by rank, of whole pipelines; none of a witness.
        microbatches: of a step.
        pipelines: by rank, the first rank of its pipeline.
        joining: by rank that joins, the seconds that it is to take for a microbatch; None: not known.
    """
    members = tuple(sorted({*promises, *joining}))
    new = tuple(rank for rank in members if rank in joining or promises[rank].is_new)
    holders = {rank: promise for rank, promise in promises.items() if not promise.is_new}
    step = max(_step_of(promise) for promise in holders.values())
    there = {rank: promise for rank, promise in holders.items() if _step_of(promise) == step}
    is_applied = len(there) == len(holders) and all(p.digests is not None for p in there.values())
    is_applied = is_applied and not drifted_in({rank: p.digests or {} for rank, p in there.items()})
    told: dict[int, list[float]] = {}
    for rank in members:
        pace_s = joining[rank] if rank in joining else promises[rank].pace_s
        told.setdefault(pipelines.get(rank, rank), []).extend([] if pace_s is None else [pace_s])
    known = sorted(max(paces) for paces in told.values() if paces)
    usual_s = known[len(known) // 2] if known else 1.0
    paces = {head: max(some, default=usual_s) for head, some in told.items()}
    held: dict[int, Ranges] = {}
    if not is_applied:
        busy_s: dict[int, float] = {}
        for rank, promise in there.items():
            head = pipelines.get(rank, rank)
            held[head] = promise.held
            busy_s[head] = max(busy_s.get(head, 0.0), promise.left * paces[head])
        able = {pipelines.get(rank, rank) for rank in holders}
        made = numbers_in(one for some in held.values() for one in some)
        missing = sorted(set(range(microbatches)) - made)
        counts = deal(len(missing), {head: paces[head] for head in able}, busy_s)
        for head, extra in hand_out(missing, counts).items():
            held[head] = (*held.get(head, ()), *extra)
    return Generation(number, members, even_shares(microbatches, paces), step, is_applied, held, new)


def drifted_in(digests: Mapping[int, Digests]) -> tuple[int, ...]:
    """Ranks whose sum of a group is not the same as the lowest rank's that is in it."""
    first: dict[int, str] = {}
    drifted = set()
    for rank in sorted(digests):
        for group, digest in digests[rank].items():
            if first.setdefault(group, digest) != digest:
                drifted.add(rank)
    return tuple(sorted(drifted))


def _step_of(promise: Promise) -> int:
    return 0 if promise.step is None else promise.step
