"""A problem with fewer devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from skyctl.records.cluster import node_of
from skyctl.records.problem import Problem, SharedResource


def with_devices(problem: Problem, ids: Collection[str]) -> Problem:
    """The problem with those of its devices only, and what it says of them; a pin may be left with none.

    An owner of data stays where all of its nodes do; else it leaves, and its data with it.
    """
    update: dict[str, Any] = {
        "devices": tuple(device for device in problem.devices if device.id in ids),
        "times": {name: times for name, times in problem.times.items() if name in ids},
        "links": tuple(link for link in problem.links if link.source in ids and link.target in ids),
        "shared": tuple(shared_among(problem.shared, ids)),
    }
    for field in ("first_stage", "last_stage", "helpers"):
        named: Sequence[str] | None = getattr(problem, field)
        update[field] = None if named is None else tuple(name for name in named if name in ids)
    if problem.owners is not None:
        nodes = {node_of(name) for name in ids}
        kept = [number for number, owner in enumerate(problem.owners) if nodes >= set(owner)]
        update |= _owners_left(problem, kept)
    return problem.model_copy(update=update)


def _owners_left(problem: Problem, kept: Sequence[int]) -> dict[str, Any]:
    """Owners, and the rhythm's numbers for them, where only some are left."""
    assert problem.owners is not None
    rhythm = problem.rhythm
    steps, clients = rhythm.local_steps, rhythm.clients_per_round
    if isinstance(steps, tuple):
        steps = tuple(steps[number] for number in kept)
    if clients is not None:
        clients = max(1, min(clients, len(kept)))
    return {
        "owners": tuple(problem.owners[number] for number in kept),
        "rhythm": rhythm.model_copy(update={"local_steps": steps, "clients_per_round": clients}),
    }


def shared_among(resources: Sequence[SharedResource], ids: Collection[str]) -> list[SharedResource]:
    """Those that links among these devices share, with these links only."""
    found = []
    for one in resources:
        pairs = tuple(pair for pair in one.links if pair[0] in ids and pair[1] in ids)
        if pairs:
            found.append(one.model_copy(update={"links": pairs}))
    return found
