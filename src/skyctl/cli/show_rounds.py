"""A plan of rounds as a person reads it: who makes how many local steps, and what the average takes."""

from __future__ import annotations

from skyctl.cli.show_data_plan import pipeline_samples
from skyctl.records.owners import owner_names
from skyctl.records.plan import Plan


def round_rows(plan: Plan, bar: int) -> list[dict[str, object]]:
    """A row for each stage; an owner's name and local steps stand in the row of its first stage.

    ``bar``: characters of a full bar.
    """
    round_s = plan.predicted.iteration_s
    names = owner_names(plan.problem.owners) if plan.problem.owners is not None else None
    memory = {device.id: device.memory_bytes for device in plan.problem.devices}
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    cut = any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    rows: list[dict[str, object]] = []
    for number, pipeline in enumerate(plan.pipelines):
        whose: dict[str, object] = {"pipeline": number} if names is None else {"owner": names[number]}
        whose |= {"local steps": pipeline.local_steps, "microbatches": pipeline.microbatches}
        if plan.workload is not None:
            whose["samples"] = pipeline_samples(plan, number)
        for place, stage in enumerate(pipeline.stages):
            said = predicted[stage.device]
            busy = said.compute_s / round_s if round_s > 0 else 0.0
            filled = min(bar, round(busy * bar))
            room = memory[stage.device]
            rows.append(
                {
                    **(whose if place == 0 else dict.fromkeys(whose, "")),
                    "device": stage.device,
                    **({"layers": f"{stage.start}:{stage.stop}"} if cut else {}),
                    "busy s": f"{said.compute_s:.3f}",
                    "load": "█" * filled + "·" * (bar - filled),
                    "busy": f"{busy:.0%}",
                    "memory GiB": f"{said.memory_bytes / 2**30:.2f} of "
                    + ("unlimited" if room is None else f"{room / 2**30:.2f}"),
                }
            )
    return rows
