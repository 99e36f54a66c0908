"""A data-parallel plan as a person reads it: who computes how much, how gradients are summed."""

from __future__ import annotations

from skyctl.compare.number_format import format_ratio, format_seconds
from skyctl.compare.sync_summary import describe_sync
from skyctl.planner.data.unused_holders import least_paying
from skyctl.records.plan import Plan

AS_FAST = 0.01
"""Two steps that differ by less, relative, are called as fast as each other."""


def share_rows(plan: Plan, bar: int) -> list[dict[str, object]]:
    """A row for each holder: its share, in samples too where the batch is known, how busy it is, its memory.

    ``bar``: characters of a full bar.
    """
    step_s = plan.predicted.iteration_s
    memory = {device.id: device.memory_bytes for device in plan.problem.devices}
    rows: list[dict[str, object]] = []
    for number, (pipeline, said) in enumerate(zip(plan.pipelines, plan.predicted.replicas, strict=True)):
        busy = said.compute_s / step_s if step_s > 0 else 0.0
        filled = min(bar, round(busy * bar))
        room = memory[said.device]
        rows.append(
            {
                "pipeline": number,
                "device": said.device,
                "microbatches": pipeline.microbatches,
                **({"samples": pipeline_samples(plan, number)} if plan.workload is not None else {}),
                "busy s": f"{said.compute_s:.3f}",
                "load": "█" * filled + "·" * (bar - filled),
                "busy": f"{busy:.0%}",
                "memory GiB": f"{said.memory_bytes / 2**30:.2f} of "
                + ("unlimited" if room is None else f"{room / 2**30:.2f}"),
            }
        )
        if pipeline.stages[0].recompute:
            rows[-1]["device"] = f"{said.device} (recomputes)"
    return rows


def pipeline_samples(plan: Plan, number: int) -> int:
    """A pipeline's samples: the step's first microbatches have one more where the batch does not divide."""
    assert plan.workload is not None
    if plan.problem.owners is not None:  # batches of its own
        return plan.workload.batch_size
    each, more = divmod(plan.workload.batch_size, plan.problem.microbatches)
    start = sum(pipeline.microbatches for pipeline in plan.pipelines[:number])
    stop = start + plan.pipelines[number].microbatches
    return each * (stop - start) + max(0, min(more, stop) - start)


def describe_sums(plan: Plan) -> list[str]:
    """In words: how gradients are summed, what a pipeline would take, and when another device would pay."""
    sync = describe_sync(plan)
    return [*([sync] if sync else []), *_pipeline(plan), *_least_batch(plan)]


def _pipeline(plan: Plan) -> list[str]:
    other_s, step_s = plan.pipeline_iteration_s, plan.predicted.iteration_s
    if other_s is None or other_s <= 0 or step_s <= 0:
        return []
    said = f"{format_seconds(other_s)} a step predicted"
    if abs(other_s / step_s - 1) <= AS_FAST:
        return [f"beside it: a pipeline is as fast ({said})"]
    if other_s < step_s:
        return [
            f"beside it: a pipeline is {format_ratio(step_s / other_s)} as fast ({said}): --parallel pipeline"
        ]
    return [f"beside it: this is {format_ratio(other_s / step_s)} as fast as a pipeline ({said})"]


def _least_batch(plan: Plan) -> list[str]:
    """Where one device is all that pays: from which batch on another one would."""
    if len(plan.pipelines) > 1 or plan.strategy not in ("heuristic", "optimal") or not plan.unused:
        return []
    found = least_paying(plan)
    if found is None:
        return ["no other device pays for its gradients, however large the batch"]
    microbatches, device = found
    batch = ""
    if plan.workload is not None:
        samples = -(-plan.workload.batch_size * microbatches // plan.problem.microbatches)
        batch = f", a batch of {samples}"
    return [
        f"no other device pays for its gradients: the first would be {device}, from {microbatches} "
        f"microbatches of this size a step on{batch}"
    ]
