"""A plan of several pipelines as a person reads it: who computes how much, how gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl.compare.number_format import format_percent, format_ratio, format_seconds
from skyctl.compare.sync_summary import describe_sync
from skyctl.planner.data.unused_reasons import least_paying
from skyctl.records.owners import owner_names
from skyctl.records.plan import Plan, ReplicaPrediction

if TYPE_CHECKING:
    from skyctl.planning.steps_without import StepWithout

AS_FAST = 0.01
"""Two steps that differ by less, relative, are called as fast as each other."""
MAX_NAMES = 4
"""Nodes or devices of which the same is said that are named, at most."""
MAX_WITHOUT = 6
"""Figures of steps without a node that are said, at most: the longest."""


def load_cells(
    prediction: ReplicaPrediction, step_s: float, room: float | None, bar: int, in_flight: int | None = None
) -> dict[str, object]:
    """How long a device is busy of a step, and how full its memory is: cells that end a row of any plan.

    Args:
        prediction: the device's predicted seconds of computing and bytes of memory.
        step_s: the predicted step, or round, in seconds.
        room: bytes that the device has; None: any number.
        bar: characters of a full bar.
        in_flight: microbatches; None: the table has no such column.
    """
    busy = prediction.compute_s / step_s if step_s > 0 else 0.0
    filled = min(bar, round(busy * bar))
    of = "unlimited" if room is None else f"{room / 2**30:.2f}"
    return {
        "busy s": f"{prediction.compute_s:.3f}",
        "load": "█" * filled + "·" * (bar - filled),
        "busy": f"{busy:.0%}",
        **({} if in_flight is None else {"in flight": in_flight}),
        "memory GiB": f"{prediction.memory_bytes / 2**30:.2f} of {of}",
    }


def share_rows(plan: Plan, bar: int) -> list[dict[str, object]]:
    """A row for each device that holds all layers: its share, in samples too where the batch is known."""
    memory = {device.id: device.memory_bytes for device in plan.problem.devices}
    rows: list[dict[str, object]] = []
    for number, (pipeline, prediction) in enumerate(
        zip(plan.pipelines, plan.predicted.replicas, strict=True)
    ):
        recomputes = " (recomputes)" if pipeline.stages[0].recompute else ""
        rows.append(
            {
                "pipeline": number,
                "device": f"{prediction.device}{recomputes}",
                "microbatches": pipeline.microbatches,
                **_samples_cell(plan, number),
                **load_cells(prediction, plan.predicted.iteration_s, memory[prediction.device], bar),
            }
        )
    return rows


def pipeline_rows(plan: Plan, bar: int) -> list[dict[str, object]]:
    """A row for each stage; what a pipeline has as a whole stands in the row of its first stage.

    In rounds that is an owner's name, where there are owners, and its local steps.
    """
    rounds, owners = plan.problem.rhythm.is_rounds, plan.problem.owners
    names = owner_names(owners) if owners is not None else None
    memory = {device.id: device.memory_bytes for device in plan.problem.devices}
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    cut = not rounds or any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    rows: list[dict[str, object]] = []
    for number, pipeline in enumerate(plan.pipelines):
        whole: dict[str, object] = {"pipeline": number} if names is None else {"owner": names[number]}
        whole |= {"local steps": pipeline.local_steps} if rounds else {}
        whole |= {"microbatches": pipeline.microbatches, **_samples_cell(plan, number)}
        for place, stage in enumerate(pipeline.stages):
            room, in_flight = memory[stage.device], None if rounds else stage.in_flight
            rows.append(
                {
                    **(whole if place == 0 else dict.fromkeys(whole, "")),
                    **({} if rounds else {"stage": place}),
                    "device": stage.device,
                    **({"layers": f"{stage.start}:{stage.stop}"} if cut else {}),
                    **load_cells(predicted[stage.device], plan.predicted.iteration_s, room, bar, in_flight),
                }
            )
    return rows


def _samples_cell(plan: Plan, number: int) -> dict[str, object]:
    return {} if plan.workload is None else {"samples": pipeline_samples(plan, number)}


def pipeline_samples(plan: Plan, number: int) -> int:
    """A pipeline's samples: the step's first microbatches have one more where the batch does not divide."""
    assert plan.workload is not None
    if plan.problem.owners is not None:  # batches of its own
        return plan.workload.batch_size
    each, more = divmod(plan.workload.batch_size, plan.problem.microbatches)
    start = sum(pipeline.microbatches for pipeline in plan.pipelines[:number])
    stop = start + plan.pipelines[number].microbatches
    return each * (stop - start) + max(0, min(more, stop) - start)


def describe_hybrid(plan: Plan) -> list[str]:
    """In words: how gradients are summed, and which device is busy longest."""
    step_s = plan.predicted.iteration_s
    busiest = max(plan.predicted.replicas, key=lambda replica: replica.compute_s)
    share = format_percent(busiest.compute_s / step_s if step_s > 0 else 0.0, sign=False)
    busy_text = f"busy longest: {busiest.device}, {format_seconds(busiest.compute_s)} of a step ({share})"
    return [*filter(None, [describe_sync(plan)]), busy_text]


def describe_sums(plan: Plan) -> list[str]:
    """In words: how gradients are summed, what a pipeline would take, and when another device would pay."""
    return [*filter(None, [describe_sync(plan)]), *_pipeline(plan), *_least_batch(plan)]


def describe_steps_without(steps: Sequence[StepWithout]) -> str:
    """In words: what a step takes without each node, the longest first, and where no pipeline is left."""
    told: dict[str, list[str]] = {}
    for step in sorted(steps, key=lambda step: -(step.step_s or 0.0)):
        if step.step_s is not None:
            figure = f"{format_seconds(step.step_s)} ({format_ratio(step.factor)})"
            told.setdefault(figure, []).append(step.node)
    figures = [f"{figure} without {_any_of(nodes)}" for figure, nodes in list(told.items())[:MAX_WITHOUT]]
    if len(told) > MAX_WITHOUT:
        figures.append("less without others")
    late_s = max((step.leaving_step_s for step in steps if step.leaving_step_s is not None), default=None)
    parts = [f"a step takes {', '.join(figures)}"] if figures else []
    if late_s is not None:
        parts.append(f"the step in which it leaves takes up to {format_seconds(late_s)}")
    if last := [step.node for step in steps if step.step_s is None]:
        parts.append(f"no pipeline is left without {_any_of(last)}")
    return f"if a node leaves and the others go on: {'; '.join(parts)}"


def _any_of(nodes: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``; of many, some."""
    if len(nodes) > MAX_NAMES:
        nodes = [*nodes[:MAX_NAMES], f"{len(nodes) - MAX_NAMES} more"]
    return nodes[0] if len(nodes) == 1 else f"{', '.join(nodes[:-1])} or {nodes[-1]}"


def _pipeline(plan: Plan) -> list[str]:
    other_s, step_s = plan.pipeline_iteration_s, plan.predicted.iteration_s
    if other_s is None or other_s <= 0 or step_s <= 0:
        return []
    predicted = f"{format_seconds(other_s)} a step predicted"
    if abs(other_s / step_s - 1) <= AS_FAST:
        return [f"beside it: a pipeline is as fast ({predicted})"]
    if other_s < step_s:
        return [
            f"beside it: a pipeline is {format_ratio(step_s / other_s)} as fast ({predicted}): "
            "--parallel pipeline"
        ]
    return [f"beside it: this is {format_ratio(other_s / step_s)} as fast as a pipeline ({predicted})"]


def _least_batch(plan: Plan) -> list[str]:
    """A line if one device is all that pays: from which batch on another one would."""
    if len(plan.pipelines) > 1 or plan.strategy not in ("heuristic", "optimal") or not plan.unused:
        return []
    least = least_paying(plan)
    if least is None:
        return ["no other device pays for its gradients, however large the batch"]
    microbatches, device = least
    batch = ""
    if plan.workload is not None:
        samples = -(-plan.workload.batch_size * microbatches // plan.problem.microbatches)
        batch = f", a batch of {samples}"
    return [
        f"no other device pays for its gradients: the first would be {device}, from {microbatches} "
        f"microbatches of this size a step on{batch}"
    ]
