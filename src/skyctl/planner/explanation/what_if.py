"""Changed problems to compare a plan with: what costs only a flag, and small changes to the machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from skyctl.records.plan import Plan
from skyctl.records.problem import LinkDtype, Problem, Schedule

INT8_BLOCK = 128
"""Values that share a float32 scale on an int8 link, as in ``worker/sums/tensor_codec.py``."""
NUMBER_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "int8": 1.0 + 4.0 / INT8_BLOCK,
}
"""Bytes one number takes on a link, by its dtype there."""
SLOW_BYTES_PER_S = 25e6
"""Links slower than this, 200 Mbit/s, are the ones ``--link-dtype DTYPE@slow`` means."""


def sent_share(dtype: LinkDtype, activations: str) -> float:
    """Bytes on the link per byte of a layer's output; 1 where the dtype is no narrower."""
    return min(1.0, NUMBER_BYTES[dtype] / NUMBER_BYTES.get(activations, 4.0))


ChangeKind = Literal["schedule", "pin", "recompute", "link dtype", "memory", "link", "shared", "device"]
"""The subject of a change; the first four cost nothing but a flag."""


@dataclass(frozen=True)
class ProblemChange:
    """A changed problem.

    ``name``: which device, link, schedule or field; ``what``: the change in words, before "would save".
    """

    kind: ChangeKind
    name: str
    what: str
    problem: Problem


def free_changes(plan: Plan, *, full: bool) -> Iterator[ProblemChange]:
    """Changes that cost nothing but a flag. ``full``: whether some device's memory is nearly full."""
    yield from _schedules(plan.problem)
    yield from _unpinned(plan.problem)
    if full and not plan.problem.recompute:
        changed = plan.problem.model_copy(update={"recompute": True})
        yield ProblemChange("recompute", "recompute", '"recompute": true in the problem', changed)
    yield from _dtypes(plan)


def _schedules(problem: Problem) -> Iterator[ProblemChange]:
    """Every other schedule; none for ``bottleneck``, where one that makes steps longer may look better.

    Zero-bubble only where the weight gradients' times are known.
    """
    if problem.objective != "iteration" or len(problem.devices) < 2:
        return
    times = [problem.times.get(device.id) for device in problem.devices]
    split = all(layer_times is not None and layer_times.weight_s is not None for layer_times in times)
    for schedule in get_args(Schedule):
        if schedule != problem.schedule and (split or schedule != "zero-bubble"):
            changed = problem.model_copy(update={"schedule": schedule})
            yield ProblemChange("schedule", schedule, f"--schedule {schedule}", changed)


def _unpinned(problem: Problem) -> Iterator[ProblemChange]:
    for field, where in (("first_stage", "first"), ("last_stage", "last")):
        if getattr(problem, field) is not None:
            changed = problem.model_copy(update={field: None})
            yield ProblemChange("pin", field, f"no pin of the {where} stage", changed)


def _dtypes(plan: Plan) -> Iterator[ProblemChange]:
    """Narrower dtypes on slow links."""
    problem = plan.problem
    if problem.objective != "iteration":
        return
    activations = "float32" if plan.workload is None else plan.workload.dtype
    for dtype in get_args(LinkDtype):
        share = sent_share(dtype, activations)
        links = tuple(
            link.model_copy(update={"dtype": dtype, "sent_share": share})
            if link.bandwidth_bytes_per_s < SLOW_BYTES_PER_S and share < min(1.0, link.sent_share)
            else link
            for link in problem.links
        )
        if links != problem.links:
            changed = problem.model_copy(update={"links": links})
            yield ProblemChange("link dtype", dtype, f"--link-dtype {dtype}@slow (rounded numbers)", changed)


def with_more_memory(problem: Problem, name: str, more_bytes: float | None) -> Problem:
    """The problem with that much more memory on one device; None: without a limit."""

    def sized(has: float | None) -> float | None:
        return None if has is None or more_bytes is None else has + more_bytes

    devices = tuple(
        d.model_copy(update={"memory_bytes": sized(d.memory_bytes)}) if d.id == name else d
        for d in problem.devices
    )
    return problem.model_copy(update={"devices": devices})


def faster_link(problem: Problem, a: str, b: str) -> ProblemChange:
    """Twice the bandwidth between two devices, both ways."""
    ends = {(a, b), (b, a)}
    links = tuple(
        link.model_copy(update={"bandwidth_bytes_per_s": 2 * link.bandwidth_bytes_per_s})
        if (link.source, link.target) in ends
        else link
        for link in problem.links
    )
    name = f"{a} ↔ {b}"
    return ProblemChange(
        "link", name, f"twice the bandwidth of {name}", problem.model_copy(update={"links": links})
    )


def faster_shared(problem: Problem) -> Iterator[ProblemChange]:
    """Twice the bandwidth of each shared resource."""
    for number, resource in enumerate(problem.shared):
        faster = resource.model_copy(update={"bandwidth_bytes_per_s": 2 * resource.bandwidth_bytes_per_s})
        changed = problem.model_copy(
            update={"shared": (*problem.shared[:number], faster, *problem.shared[number + 1 :])}
        )
        yield ProblemChange("shared", resource.name, f"twice the bandwidth of {resource.name}", changed)


def without_device(problem: Problem, name: str) -> Problem | None:
    """The problem without a device; None where only it may be first or last."""
    pins = {}
    for field in ("first_stage", "last_stage"):
        names = getattr(problem, field)
        pins[field] = None if names is None else tuple(n for n in names if n != name)
        if pins[field] == ():
            return None
    return problem.model_copy(
        update={
            **pins,
            "devices": tuple(d for d in problem.devices if d.id != name),
            "times": {d: times for d, times in problem.times.items() if d != name},
            "links": tuple(k for k in problem.links if name not in (k.source, k.target)),
            "shared": tuple(
                r.model_copy(update={"links": tuple(pair for pair in r.links if name not in pair)})
                for r in problem.shared
            ),
        }
    )
