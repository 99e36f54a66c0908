"""Changes to a problem that cost nothing but a flag: schedule, pins, recomputation, fewer bytes on links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from skyctl.records.plan import Plan
from skyctl.records.problem import LinkDtype, Problem, Schedule

INT8_BLOCK = 128
"""Values that share a float32 scale on an int8 link, as in ``worker/codec.py``."""
WIDTHS = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0 + 4.0 / INT8_BLOCK}
"""Bytes on a link for one number."""
SLOW_BYTES_PER_S = 25e6
"""Links below this, 200 Mbit/s, are what ``--link-dtype DTYPE@slow`` is about."""


def sent_share(dtype: LinkDtype, activations: str) -> float:
    """Bytes on the link for a byte of a layer's output; 1 where the dtype is no narrower."""
    return min(1.0, WIDTHS[dtype] / WIDTHS.get(activations, 4.0))


@dataclass(frozen=True)
class Change:
    """A changed problem. ``what``: the words for it, before "would save"."""

    kind: str
    name: str
    what: str
    problem: Problem


def free(plan: Plan, *, full: bool) -> Iterator[Change]:
    """All of them. ``full``: whether some device's memory nearly is."""
    yield from _schedules(plan.problem)
    yield from _unpinned(plan.problem)
    if full and not plan.problem.recompute:
        changed = plan.problem.model_copy(update={"recompute": True})
        yield Change("recompute", "recompute", '"recompute": true in the problem', changed)
    yield from _dtypes(plan)


def _schedules(problem: Problem) -> Iterator[Change]:
    """Each other one. For ``bottleneck`` a schedule that makes steps longer may look better: none.
    Zero-bubble only where it is known what can be put off."""
    if problem.objective != "iteration" or len(problem.devices) < 2:
        return
    times = [problem.times.get(device.id) for device in problem.devices]
    split = all(known is not None and known.weight_s is not None for known in times)
    for schedule in get_args(Schedule):
        if schedule != problem.schedule and (split or schedule != "zero-bubble"):
            changed = problem.model_copy(update={"schedule": schedule})
            yield Change("schedule", schedule, f"--schedule {schedule}", changed)


def _unpinned(problem: Problem) -> Iterator[Change]:
    for field, where in (("first_stage", "first"), ("last_stage", "last")):
        if getattr(problem, field) is not None:
            changed = problem.model_copy(update={field: None})
            yield Change("pin", field, f"no pin of the {where} stage", changed)


def _dtypes(plan: Plan) -> Iterator[Change]:
    """Fewer bytes for each number on slow links."""
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
            yield Change("link dtype", dtype, f"--link-dtype {dtype}@slow (rounded numbers)", changed)
