"""What ranks are told that are to go on, in the same step, where one of them is lost. Pure."""

from __future__ import annotations

from skyctl.errors import InfeasibleError, InputError
from skyctl.planner.stage_memory import human_bytes
from skyctl.planner.summed_bytes import gradient_bytes
from skyctl.planning.backend_choice import backend_of
from skyctl.records.backend import SKYCTL
from skyctl.records.plan import Plan
from skyctl.run.run_options import RunOptions
from skyctl.worker.rank_order import ElasticOrder, RouteTree

SUMMED = ("float32", "bfloat16", "fixed32")
"""Formats whose sums can be made again: they keep nothing from one step to the next."""


def elastic_order(plan: Plan, least: int, *, dynamic: bool = False) -> ElasticOrder:
    """What each rank of the plan is told.

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
        number: tuple(
            RouteTree(
                share=route.share,
                root=ranks[route.root],
                up=tuple((ranks[child], ranks[parent]) for child, parent in route.up),
                down=tuple((ranks[parent], ranks[child]) for parent, child in route.down),
            )
            for route in group.routes
        )
        for number, group in enumerate(plan.sync.groups)
    }
    return ElasticOrder(pipelines, shares, routes, least, witness=len(ranks) % 2 == 0, dynamic=dynamic)


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
    """What the plan has that does not survive a lost rank; None: nothing."""
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
