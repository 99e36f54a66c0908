"""Which ranks hold the same layers, as each is told of it for ``skyctl.replicas()``."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.records.pipeline import Pipeline
from skyctl.records.plan import Plan
from skyctl.worker.rank_order import ReplicaOrder, Unlike


def replica_orders(
    plan: Plan, addresses: Sequence[str], *, may_leave: bool = False
) -> list[ReplicaOrder | None]:
    """The order of each rank that holds layers, in rank order; None: nobody else holds its layers.

    Args:
        addresses: by rank, at which the others reach it.
        may_leave: ranks may, and the others go on.
    """
    stages = [index for pipeline in plan.pipelines for index in range(len(pipeline.stages))]
    if len(plan.pipelines) == 1:
        return [None] * len(stages)
    unlike = Unlike("elastic") if may_leave else _unlike(plan)
    orders: list[ReplicaOrder | None] = []
    for rank, stage in enumerate(stages):
        alike = tuple(other for other, index in enumerate(stages) if index == stage)
        ranks = alike if unlike is None else (rank,)
        orders.append(ReplicaOrder(ranks, addresses[rank], unlike))
    return orders


def _unlike(plan: Plan) -> Unlike | None:
    pipelines, rhythm = plan.pipelines, plan.problem.rhythm
    if rhythm.is_rounds or rhythm.is_stale:
        return Unlike("rhythm")
    for reason, figures in (
        ("stages", [_cut(pipeline) for pipeline in pipelines]),
        ("microbatches", [str(pipeline.microbatches) for pipeline in pipelines]),
        ("order", [_order(pipeline) for pipeline in pipelines]),
    ):
        if len(set(figures)) > 1:
            return Unlike(reason, tuple(figures))
    return None


def _cut(pipeline: Pipeline) -> str:
    return "+".join(f"{stage.start}–{stage.stop}" for stage in pipeline.stages)


def _order(pipeline: Pipeline) -> str:
    """The figures that decide the order of a pipeline's forwards and backwards, by stage."""
    return "+".join(
        f"{stage.in_flight}/{stage.weights_behind}/{stage.recompute:d}" for stage in pipeline.stages
    )
