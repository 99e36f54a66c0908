"""A problem with fewer devices, and for plans of another form."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from skyctl.control.form_choice import STAGE_ORDERS
from skyctl.records.problem import Parallel, Problem, SharedResource
from skyctl.records.rhythm import Rhythm


def with_devices(problem: Problem, ids: Collection[str]) -> Problem:
    """The problem with those of its devices only, and what it says of them; a pin may be left with none."""
    update: dict[str, Any] = {
        "devices": tuple(device for device in problem.devices if device.id in ids),
        "times": {name: times for name, times in problem.times.items() if name in ids},
        "links": tuple(link for link in problem.links if link.source in ids and link.target in ids),
        "shared": tuple(shared_among(problem.shared, ids)),
    }
    for field in ("first_stage", "last_stage", "helpers"):
        named: Sequence[str] | None = getattr(problem, field)
        update[field] = None if named is None else tuple(name for name in named if name in ids)
    return problem.model_copy(update=update)


def shared_among(resources: Sequence[SharedResource], ids: Collection[str]) -> list[SharedResource]:
    """Those that links among these devices share, with these links only."""
    found = []
    for one in resources:
        pairs = tuple(pair for pair in one.links if pair[0] in ids and pair[1] in ids)
        if pairs:
            found.append(one.model_copy(update={"links": pairs}))
    return found


def in_form(problem: Problem, parallel: Parallel) -> Problem:
    """The same problem for plans of another form.

    A pipeline's has no devices that are to hold nothing; that of several pipelines has no schedule that only
    one can have. A parameter server is between devices that hold all layers each: others sum.
    """
    if parallel == "pipeline" and problem.helpers:
        problem = with_devices(problem, {device.id for device in problem.devices} - {*problem.helpers})
    update: dict[str, Any] = {"parallel": parallel}
    if parallel != "pipeline" and problem.schedule in STAGE_ORDERS:
        update["schedule"] = "1f1b"
    if parallel != "data" and problem.rhythm.is_stale:
        update["rhythm"] = Rhythm()
    return problem.model_copy(update=update)
