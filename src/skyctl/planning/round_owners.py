"""The options of rounds and their owners, as fields of a problem."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from skyctl.errors import InputError, InvalidRecordError
from skyctl.inventory.yaml_document import nearest_word_hint
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.base import describe
from skyctl.records.cluster import node_of
from skyctl.records.problem import Parallel, Problem
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync_format import WEIGHT_FORMATS


def with_rounds(problem: Problem, options: PlanOptions) -> Problem:
    """The problem with owners and the parallelism they come to. Raises InputError as ``round_fields``."""
    fields = round_fields(problem, options)
    if not fields:
        return problem
    try:
        return Problem.model_validate({**dict(problem), **fields})
    except InvalidRecordError as exc:
        raise InputError(describe(exc, Problem)) from exc


def check_rounds(options: PlanOptions, nodes: Collection[str] | None = None) -> None:
    """Looks at what can be said of rounds before anything is measured.

    Args:
        nodes: those that owners may name; None: not known yet.

    Raises:
        InputError: what is asked for does not go with local steps, an owner's node is not there, or there are
            not as many owners as the rhythm says.
    """
    if options.rhythm is None or not options.rhythm.is_rounds:
        return
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
    if options.owners is None or options.owners == "all":
        return
    for node in (node for owner in options.owners for node in owner):
        if nodes is not None and node not in nodes:
            raise InputError(f"--owners: {node!r} is no node{nearest_word_hint(node, nodes)}")
    _require_fitting(options.rhythm, len(options.owners))


def check_owners_parallelism(options: PlanOptions) -> None:
    """Raises InputError where devices are to hold all layers each, and an owner's nodes to share them."""
    if options.parallel != "data" or options.owners is None or options.owners == "all":
        return
    if (several := next((owner for owner in options.owners if len(owner) > 1), None)) is not None:
        raise InputError(
            f"--parallel data has each device hold all layers; the owner {'+'.join(several)} has "
            f"{len(several)} nodes, which share them",
            hint="leave --parallel out, or make each of them an owner",
        )


def round_fields(problem: Problem, options: PlanOptions) -> dict[str, Any]:
    """The problem's owners, and the parallelism they come to; nothing where no local steps are asked for.

    Raises:
        InputError: as ``check_rounds``, of the nodes that the problem has devices of.
    """
    if options.rhythm is None or not options.rhythm.is_rounds:
        return {}
    devices = [node_of(device.id) for device in problem.devices]
    nodes = dict.fromkeys(devices)
    check_rounds(options, nodes)
    if options.owners is None:
        return {"parallel": "data"}
    owners = options.owners
    if owners == "all":
        owners = tuple((node,) for node in nodes)
        _require_fitting(options.rhythm, len(owners))
    parallelism: Parallel = "data"
    if any(sum(devices.count(node) for node in owner) > 1 for owner in owners):
        parallelism = "hybrid"  # an owner's devices may become a pipeline
    return {"owners": owners, "parallel": parallelism}


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
            f"--clients-per-round {clients}: there are only {owners} owners",
            hint=f"at most --clients-per-round {owners}",
        )
