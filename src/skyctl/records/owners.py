"""Owners of data, what they are called, and what must hold of problems and plans with local steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from skyctl.records.cluster import node_of
from skyctl.records.sync_format import WEIGHT_FORMATS

if TYPE_CHECKING:
    from skyctl.records.plan import Plan
    from skyctl.records.problem import Problem


def owner_names(owners: Sequence[Sequence[str]]) -> list[str]:
    """What owners are called, in scripts and figures: their nodes, with a plus between."""
    return ["+".join(nodes) for nodes in owners]


def local_steps_by_owner(problem: Problem) -> dict[str, int | Literal["auto"]]:
    """By owner, the local steps of a round that are asked for, as the rhythm has them.

    Empty where gradients are summed in every step. Where data is nobody's alone there is one, called "".
    """
    steps, owners = problem.rhythm.local_steps, problem.owners
    if steps is None:
        return {}
    names = [""] if owners is None else owner_names(owners)
    return dict(zip(names, steps if isinstance(steps, tuple) else [steps] * len(names), strict=True))


def check_rounds(problem: Problem) -> None:
    """Raises ValueError where local steps do not go with the rest of a problem, or its owners' nodes."""
    rhythm, owners = problem.rhythm, problem.owners
    if not rhythm.is_rounds:
        if owners is not None:
            raise ValueError("owners are of a problem whose rhythm has local_steps")
        return
    if problem.parallel == "pipeline" or (problem.parallel == "hybrid" and owners is None):
        raise ValueError(
            "local steps without owners are of devices that hold all layers each: parallel 'data'"
        )
    if problem.sync_format not in WEIGHT_FORMATS:
        raise ValueError(f"weights are averaged as {', '.join(WEIGHT_FORMATS)}, not as {problem.sync_format}")
    if problem.sync in ("server", "trees") or problem.helpers:
        raise ValueError(
            "weights are averaged over a ring or a star of those that hold them, without helpers"
        )
    if owners is None:
        if isinstance(rhythm.local_steps, tuple):
            raise ValueError("a number of local steps for each owner is of a problem with owners")
        if (
            rhythm.clients_per_round is not None
            or rhythm.drop_stragglers
            or rhythm.round_deadline_s is not None
        ):
            raise ValueError("clients, stragglers and deadlines are of a problem with owners")
        return
    _check_owners(problem, owners)


def _check_owners(problem: Problem, owners: Sequence[Sequence[str]]) -> None:
    """Raises ValueError where an owner's node has no device, or two owners have the same."""
    rhythm = problem.rhythm
    there = {node_of(device.id) for device in problem.devices}
    named = [node for owner in owners for node in owner]
    if not owners or not all(owners):
        raise ValueError("owners: each has one node or more, and there is one owner at least")
    for node in named:
        if node not in there:
            raise ValueError(f"owners names node {node!r}, which has no device in devices")
    if len(set(named)) < len(named):
        twice = next(node for node in named if named.count(node) > 1)
        raise ValueError(f"owners: node {twice!r} belongs to two owners")
    if rhythm.clients_per_round is not None and rhythm.clients_per_round > len(owners):
        raise ValueError(f"{rhythm.clients_per_round} clients a round, and there are {len(owners)} owners")
    if isinstance(rhythm.local_steps, tuple) and len(rhythm.local_steps) != len(owners):
        raise ValueError(f"{len(rhythm.local_steps)} numbers of local steps for {len(owners)} owners")


def check_local_steps(plan: Plan) -> None:
    """Raises ValueError where a plan's local steps, sum or pipelines are not what its problem asks for."""
    rounds = plan.problem.rhythm.is_rounds
    if any((pipeline.local_steps is not None) != rounds for pipeline in plan.pipelines):
        raise ValueError("pipelines have local_steps where the problem's rhythm has them, and only there")
    if plan.sync is not None and (plan.sync.of == "weights") != rounds:
        raise ValueError(f"the plan sums {plan.sync.of}, and local steps end with a sum of weights")
    owners = plan.problem.owners
    if owners is not None and len(owners) != len(plan.pipelines):
        raise ValueError(f"the plan has {len(plan.pipelines)} pipelines for {len(owners)} owners")
    for number, (owner, pipeline) in enumerate(zip(owners or (), plan.pipelines, strict=False)):
        if pipeline.microbatches != plan.problem.microbatches:
            raise ValueError(
                f"pipeline {number} takes {pipeline.microbatches} microbatches; of its own batches an owner "
                f"computes all {plan.problem.microbatches}"
            )
        for stage in pipeline.stages:
            if node_of(stage.device) not in owner:
                raise ValueError(
                    f"pipeline {number} trains on the data of {'+'.join(owner)}, and "
                    f"{stage.device!r} is not its owner's"
                )
