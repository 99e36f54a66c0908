"""A plan of several pipelines as a person reads it: which pipeline has what, how gradients are summed."""

from __future__ import annotations

from skyctl.cli.show_data_plan import pipeline_samples
from skyctl.compare.number_format import format_percent, format_seconds
from skyctl.compare.sync_summary import describe_sync
from skyctl.records.plan import Plan


def pipeline_rows(plan: Plan, bar: int) -> list[dict[str, object]]:
    """A row for each stage; a pipeline's number and share of the step stand in the row of its first stage.

    ``bar``: characters of a full bar.
    """
    step_s = plan.predicted.iteration_s
    memory = {device.id: device.memory_bytes for device in plan.problem.devices}
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    rows: list[dict[str, object]] = []
    for number, pipeline in enumerate(plan.pipelines):
        for place, stage in enumerate(pipeline.stages):
            said = predicted[stage.device]
            busy = said.compute_s / step_s if step_s > 0 else 0.0
            filled = min(bar, round(busy * bar))
            room = memory[stage.device]
            share: dict[str, object] = {"pipeline": number, "microbatches": pipeline.microbatches}
            if plan.workload is not None:
                share["samples"] = pipeline_samples(plan, number)
            rows.append(
                {
                    **(share if place == 0 else dict.fromkeys(share, "")),
                    "stage": place,
                    "device": stage.device,
                    "layers": f"{stage.start}:{stage.stop}",
                    "busy s": f"{said.compute_s:.3f}",
                    "load": "█" * filled + "·" * (bar - filled),
                    "busy": f"{busy:.0%}",
                    "in flight": stage.in_flight,
                    "memory GiB": f"{said.memory_bytes / 2**30:.2f} of "
                    + ("unlimited" if room is None else f"{room / 2**30:.2f}"),
                }
            )
    return rows


def describe_hybrid(plan: Plan) -> list[str]:
    """In words: how gradients are summed, and which device is busy longest."""
    sync = describe_sync(plan)
    step_s = plan.predicted.iteration_s
    busiest = max(plan.predicted.replicas, key=lambda replica: replica.compute_s)
    share = format_percent(busiest.compute_s / step_s if step_s > 0 else 0.0, sign=False)
    return [
        *([sync] if sync else []),
        f"busy longest: {busiest.device}, {format_seconds(busiest.compute_s)} of a step ({share})",
    ]
