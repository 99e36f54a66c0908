"""The orders of ranks that are to go on, in the same step, if one of them is lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from skyctl.checkpoint.launcher.policy import shard_limits
from skyctl.errors import InfeasibleError, InputError
from skyctl.planner.stage_memory import human_bytes
from skyctl.planner.summed_bytes import gradient_bytes
from skyctl.planning.backend_choice import backend_of
from skyctl.records.backend import SKYCTL
from skyctl.records.cluster import Node, split_device_id
from skyctl.records.plan import Plan
from skyctl.run.rank_spec import AttemptCheckpoints, RankSpec
from skyctl.run.run_options import RunOptions
from skyctl.run.sum_spec import route_tree
from skyctl.worker.rank_order import (
    CheckpointOptions,
    ElasticOrder,
    JoinOrder,
    LinkDtypes,
    RankOrder,
    ReplicaOrder,
    RoutePlace,
    TurnsOrder,
    Unlike,
)
from skyctl.workload.workload_spec import WorkloadSpec

SUMMED = ("float32", "bfloat16", "fixed32")
"""Formats whose sums can be made again: they keep nothing from one step to the next."""


def elastic_order(plan: Plan, least: int, *, dynamic: bool = False) -> ElasticOrder:
    """The order that each rank of the plan is given.

    Args:
        dynamic: shares follow devices' measured paces.
        least: with fewer pipelines the run does not go on in the same attempt.

    Raises:
        InfeasibleError: a device has no room for what it keeps.
        InputError: says what the plan has that does not survive a lost rank.
    """
    fault = _fault(plan)
    if fault is not None:
        raise InputError(
            f"--elastic: steps survive a lost device if other pipelines sum with its own; {fault}",
            hint="plan it so (--parallel data, or hybrid), or leave --elastic out: it then goes on from its "
            "checkpoint",
        )
    if least > len(plan.pipelines):
        raise InputError(
            f"--min-pipelines {least}: the plan has {len(plan.pipelines)}",
            hint=f"give {len(plan.pipelines)} or less",
        )
    _check_memory(plan)
    assert plan.sync is not None
    ranks = {stage.device: rank for rank, stage in enumerate(plan.placed_stages)}
    first, head, shares, pipelines = 0, 0, dict[int, tuple[int, int]](), dict[int, int]()
    for pipeline in plan.pipelines:
        shares[head] = (first, first + pipeline.microbatches)
        pipelines |= {head + stage: head for stage in range(len(pipeline.stages))}
        first, head = first + pipeline.microbatches, head + len(pipeline.stages)
    routes = {
        number: tuple(route_tree(route, ranks) for route in group.routes)
        for number, group in enumerate(plan.sync.groups)
    }
    return ElasticOrder(pipelines, shares, routes, least, witness=len(ranks) % 2 == 0, dynamic=dynamic)


def may_grow(plan: Plan) -> bool:
    """Whether devices may enter an attempt with this plan: each rank holds all layers."""
    return _fault(plan) is None and all(len(pipeline.stages) == 1 for pipeline in plan.pipelines)


def memory_to_enter(plan: Plan) -> float:
    """The bytes that a device needs to enter: as one of the plan that holds all layers."""
    copy_bytes = sum(map(gradient_bytes, plan.problem.layers))
    return max(replica.memory_bytes for replica in plan.predicted.replicas) + copy_bytes


def entering_spec(
    first: RankSpec,
    plan: Plan,
    node: Node,
    device: str,
    hosts: Mapping[int, str],
    rank: int,
    *,
    address: str = "",
    workload: WorkloadSpec | None = None,
    checkpoints: AttemptCheckpoints | None = None,
    folder: Path = Path(),
    pace_s: float | None = None,
) -> RankSpec:
    """A rank that enters an attempt under way.

    Args:
        first: the attempt's first rank.
        node: the new one's.
        device: its id.
        hosts: by rank, where the members are reached.
        address: where they reach the new one.
        workload: with the paths of its node; None: as the first rank's.
        checkpoints: of the attempt.
        folder: on its node, for the weights that it is given.
        pace_s: seconds that it is expected to take for a microbatch.
    """
    order = first.order
    assert isinstance(order, RankOrder)
    assert order.elastic is not None
    assert order.sync is not None
    kept = checkpoints or AttemptCheckpoints()
    groups = tuple(
        replace(group, routes=tuple(RoutePlace(route.share, (), None, None, ()) for route in group.routes))
        for group in order.sync.groups
    )
    limits = shard_limits(plan.problem)
    threads = {machine.device: machine.threads for machine in plan.machines}
    made = replace(
        order,
        world=replace(
            order.world,
            rank=rank,
            ranks=rank + 1,
            interface=node.interface,
            hosts=dict(hosts),
            clock_of=None,
            clock_for=(),
        ),
        device=split_device_id(device)[1],
        threads=node.threads or threads.get(device),
        slowdown=node.slowdown,
        workload=workload or order.workload,
        pipeline=rank,
        microbatch_range=(0, 1),
        link_dtypes=LinkDtypes(),
        compare_batches=False,
        sync=replace(order.sync, groups=groups),
        checkpoint=None
        if kept.every is None
        else CheckpointOptions(
            folder=Path(kept.folders[node.name]),
            every=kept.every,
            keep=kept.keep,
            at_end=True,
            attempt=kept.attempt,
            writes=False,
        ),
        resume=None,
        replicas=ReplicaOrder((rank,), address, Unlike("elastic")),
        best=kept.best,
        turns=None if order.turns is None else TurnsOrder(order.turns.policy, device),
        elastic=replace(
            order.elastic,
            pipelines={member: member for member in sorted((*hosts, rank))},
            join=JoinOrder(folder, pace_s, limits),
        ),
    )
    return RankSpec(rank, node.name, device, made, limits, first.summed_numels)


def _check_memory(plan: Plan) -> None:
    """Raises InfeasibleError where a device has no room for a second copy of its gradients."""
    room = {device.id: device.memory_bytes for device in plan.problem.devices}
    layers = {stage.device: plan.problem.layers[stage.start : stage.stop] for stage in plan.placed_stages}
    for replica in plan.predicted.replicas:
        copy_bytes = sum(map(gradient_bytes, layers[replica.device]))
        has, needs = room[replica.device], replica.memory_bytes + copy_bytes
        if has is not None and needs > has:
            raise InfeasibleError(
                f"--elastic keeps a second copy of gradients ({human_bytes(copy_bytes)}): {replica.device} "
                f"needs {human_bytes(needs)} and has {human_bytes(has)}",
                hint="leave --elastic out, or plan without that device: --limit",
            )


def is_elastic(plan: Plan, options: RunOptions) -> bool:
    """Whether an attempt with this plan survives lost ranks: a later one may have a plan that does not."""
    return options.elastic and _fault(plan) is None


def _fault(plan: Plan) -> str | None:
    """The property of the plan that does not survive a lost rank, in words; None: it has none."""
    sync = plan.sync
    if len(plan.pipelines) < 2 or sync is None:
        return "the plan has one pipeline"
    batch = 0 if plan.workload is None else plan.workload.batch_size
    microbatches = sum(pipeline.microbatches for pipeline in plan.pipelines)
    if any(len(pipeline.stages) > 1 for pipeline in plan.pipelines) and batch % microbatches:
        return "the plan cuts its pipelines into stages, and its microbatches are not all of one size"
    if plan.helpers:
        return f"the plan has {plan.helpers[0]} only help to sum"
    if not plan.problem.rhythm.is_synchronous or plan.problem.owners is not None:
        return "the plan's updates are late, stale or made in rounds"
    if sync.format not in SUMMED:
        return f"the plan sums as {sync.format}"
    if backend_of(plan) != SKYCTL:
        return f"the plan's backend is {backend_of(plan)}"
    return None
