"""What options say of rounds and their owners, as fields of a problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyctl.errors import InputError, InvalidRecordError
from skyctl.records.base import describe
from skyctl.records.cluster import node_of
from skyctl.records.problem import Parallel, Problem
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync_format import WEIGHT_FORMATS

if TYPE_CHECKING:
    from skyctl.control.plan_creation import PlanOptions


def with_rounds(problem: Problem, options: PlanOptions) -> Problem:
    """The problem with owners and the form that they come to. Raises InputError as ``round_fields``."""
    fields = round_fields(problem, options)
    if not fields:
        return problem
    try:
        return Problem.model_validate({**dict(problem), **fields})
    except InvalidRecordError as exc:
        raise InputError(describe(exc, Problem)) from exc


def round_fields(problem: Problem, options: PlanOptions) -> dict[str, Any]:
    """The problem's owners, and the form that they come to; nothing where no local steps are asked for.

    Raises:
        InputError: an owner's node has no device, or what is asked for does not go with local steps.
    """
    if options.rhythm is None or not options.rhythm.is_rounds:
        return {}
    for flag, given in (
        ("--helper", options.helpers is not None),
        (f"--sync {options.sync}", options.sync in ("server", "trees")),
        (f"--sync-format {options.sync_format}", options.sync_format not in (None, *WEIGHT_FORMATS)),
        (f"--schedule {options.schedule}", options.schedule not in (None, "auto", "1f1b", "sequential")),
        (f"--objective {options.objective}", options.objective not in (None, "iteration")),
        ("--whole-blocks", options.whole_blocks),
    ):
        if given:
            raise InputError(
                f"{flag} does not go with --local-steps, whose weights are averaged as "
                f"{', '.join(WEIGHT_FORMATS[:-1])} or {WEIGHT_FORMATS[-1]} over a ring or a star of those "
                "that hold them",
                hint=f"leave {flag.split()[0]} out",
            )
    if options.owners is None:
        return {"parallel": "data"}
    nodes = dict.fromkeys(node_of(device.id) for device in problem.devices)
    owners = tuple((node,) for node in nodes) if options.owners == "all" else options.owners
    for node in (node for owner in owners for node in owner):
        if node not in nodes:
            raise InputError(
                f"--owners {node!r} is no node of the problem",
                hint=f"it has {', '.join(nodes)}",
            )
    _require_fitting(options.rhythm, len(owners))
    form: Parallel = "data"
    devices = [node_of(device.id) for device in problem.devices]
    if any(sum(devices.count(node) for node in owner) > 1 for owner in owners):
        form = "hybrid"  # an owner's devices may become a pipeline
    return {"owners": owners, "parallel": form}


def _require_fitting(rhythm: Rhythm, owners: int) -> None:
    """Raises InputError where the rhythm speaks of more owners than there are, or of fewer."""
    steps, clients = rhythm.local_steps, rhythm.clients_per_round
    if isinstance(steps, tuple) and len(steps) != owners:
        raise InputError(
            f"--local-steps has {len(steps)} numbers for {owners} owners",
            hint="one number for all, or one for each owner in their order",
        )
    if clients is not None and clients > owners:
        raise InputError(
            f"--clients-per-round {clients} of {owners} owners", hint=f"at most --clients-per-round {owners}"
        )
