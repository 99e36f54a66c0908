"""Which ranks hold the same layers, as each is told of it for ``skyctl.replicas()``."""

from __future__ import annotations

from typing import Any

from skyctl.records.plan import Plan


def replica_structures(plan: Plan) -> list[dict[str, Any]]:
    """By rank that holds layers, what ``worker.replicas.ReplicaPlace`` is made of.

    ``ranks``: those of the same stage of all pipelines. ``unlike``: why they would not call the same
    collectives in a step, and the figures of each pipeline that differ; None: they would.
    """
    unlike = _unlike(plan)
    stages = [
        (index, number) for number, line in enumerate(plan.pipelines) for index in range(len(line.stages))
    ]
    if unlike is not None and unlike["reason"] == "stages":
        return [{"ranks": [rank], "unlike": unlike} for rank in range(len(stages))]
    return [
        {"ranks": [rank for rank, (other, _) in enumerate(stages) if other == index], "unlike": unlike}
        for index, _ in stages
    ]


def _unlike(plan: Plan) -> dict[str, Any] | None:
    if len(plan.pipelines) == 1:
        return None
    rhythm = plan.problem.rhythm
    if rhythm.is_rounds or rhythm.is_stale:
        return {"reason": "rhythm", "figures": []}
    cuts = [[[stage.start, stage.stop] for stage in pipeline.stages] for pipeline in plan.pipelines]
    if any(cut != cuts[0] for cut in cuts):
        return {"reason": "stages", "figures": cuts}
    counts = [pipeline.microbatches for pipeline in plan.pipelines]
    if len(set(counts)) > 1:
        return {"reason": "microbatches", "figures": counts}
    orders = [
        [[stage.in_flight, stage.weights_behind, int(stage.recompute)] for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]
    if any(order != orders[0] for order in orders):
        return {"reason": "order", "figures": orders}
    return None
