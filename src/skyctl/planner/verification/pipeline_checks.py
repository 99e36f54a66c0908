"""A plan of several pipelines as checks of hybrids and of rounds read it, and what both check alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skyctl.errors import InputError
from skyctl.planner.stage_memory import human_bytes
from skyctl.planner.verification.data_step import CheckedRoute, checked_routes, ring_and_stars
from skyctl.planner.verification.hybrid_step import CheckedHybrid, HeldRange, SummedRange
from skyctl.planner.verification.verdict import TOLERANCE, Check, is_close
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.sync import Sync
from skyctl.schedule.actions import check_in_flight

Rows = list[list[HeldRange]]
"""By pipeline, its stages."""


def read_rows(problem: Problem, plan: Plan) -> Rows:
    """By pipeline, its stages.

    Raises:
        InputError: these are no pipelines over all layers, or a device holds more than one stage.
    """
    index = {device.id: d for d, device in enumerate(problem.devices)}
    rows: Rows = []
    for number, pipeline in enumerate(plan.pipelines):
        at, row = 0, []
        for stage in pipeline.stages:
            if stage.device not in index:
                raise InputError(f"the plan names device {stage.device!r}, which is not in the problem")
            if stage.recompute:
                raise InputError(f"{stage.device} recomputes; stages of several pipelines do not")
            if stage.start != at:
                raise InputError(f"a stage of pipeline {number} starts at layer {stage.start}, not at {at}")
            at = stage.stop
            share = pipeline.microbatches
            row.append(HeldRange(index[stage.device], stage.start, stage.stop, stage.in_flight, share))
        if at != len(problem.layers):
            raise InputError(f"pipeline {number} covers {at} layers, the problem has {len(problem.layers)}")
        depths, behind = [x.in_flight for x in row], [x.weights_behind for x in pipeline.stages]
        wrong = check_in_flight(problem.schedule, depths, pipeline.microbatches, behind)
        if wrong is not None:
            raise InputError(f"pipeline {number}: {wrong}")
        rows.append(row)
    devices = [one.device for row in rows for one in row]
    if len(set(devices)) < len(devices):
        twice = next(d for d in devices if devices.count(d) > 1)
        raise InputError(f"{problem.devices[twice].id} holds more than one stage")
    return rows


def read_groups(step: CheckedHybrid, sync: Sync, rows: Rows) -> list[SummedRange]:
    """The groups of layers that are summed.

    Raises:
        InputError: they are not what the same devices hold, or their routes no ring or star.
    """
    problem = step.problem
    if sync.format != problem.sync_format:
        raise InputError(f"{sync.of} are sent as {sync.format}, the problem says {problem.sync_format}")
    wanted = step.groups(rows)
    said = [(group.start, group.stop) for group in sync.groups]
    if said != [(start, stop) for start, stop, _ in wanted]:
        ranges = ", ".join(f"[{start}, {stop})" for start, stop, _ in wanted)
        raise InputError(f"the sync groups are not the layers that the same devices hold: {ranges}")
    out = []
    for group, (start, stop, devices) in zip(sync.groups, wanted, strict=True):
        trees = checked_routes(group.routes)
        if not any(_are_same(trees, other) for other in ring_and_stars(devices, problem.sync)):
            raise InputError(
                f"the routes of layers [{start}, {stop}) are no ring or star of {', '.join(devices)}"
                + (f", as sync {problem.sync} asks for" if problem.sync != "auto" else "")
            )
        out.append(SummedRange(start, stop, trees))
    return out


def chunk_bytes_of(plan: Plan) -> int:
    """The most bytes in a message of the plan's sums; the default where it sums nothing."""
    usual: int = Sync.model_fields["chunk_bytes"].default
    return usual if plan.sync is None else plan.sync.chunk_bytes


def _are_same(trees: Sequence[CheckedRoute], others: Sequence[CheckedRoute]) -> bool:
    """Whether both have the same edges and shares, in any order."""

    def by_root(routes: Sequence[CheckedRoute]) -> list[CheckedRoute]:
        return sorted(routes, key=lambda route: route.root)

    return len(trees) == len(others) and all(
        a.root == b.root
        and math.isclose(a.share, b.share, rel_tol=TOLERANCE)
        and (len(a.up), set(a.up)) == (len(b.up), set(b.up))
        and (len(a.down), set(a.down)) == (len(b.down), set(b.down))
        for a, b in zip(by_root(trees), by_root(others), strict=True)
    )


def check_pins(step: CheckedHybrid, rows: Rows) -> Check:
    """Whether each pipeline's first and last stage are on devices that may hold them."""
    for number, row in enumerate(rows):
        for one, may, where in (
            (row[0], step.facts.may_be_first, "first"),
            (row[-1], step.facts.may_be_last, "last"),
        ):
            if not may(one.device):
                detail = f"{step.ids[one.device]} may not hold the {where} stage of pipeline {number}"
                return Check(name="pins", ok=False, detail=detail)
    return Check(name="pins", ok=True, detail="every pipeline's first and last stage are where they may be")


def check_ties(step: CheckedHybrid, held: Sequence[HeldRange]) -> Check:
    """Whether layers that share parameters are in one stage."""
    for one in held:
        if step.splits_tie(one.start, one.stop):
            detail = f"{step.ids[one.device]} holds some of the layers that share parameters, not all"
            return Check(name="ties", ok=False, detail=detail)
    return Check(name="ties", ok=True, detail="layers that share parameters are in one stage each")


def tie_exchange_s(problem: Problem, held: Sequence[tuple[int, int, int]]) -> float:
    """Seconds in which the holders of shared parameters' copies sum gradients over the first of them.

    Args:
        held: by stage of one pipeline, its device (its index in the problem), first layer and the one after
            its last.
    """
    seconds = []
    for tie in problem.ties:
        first, *later = (
            problem.devices[device].id
            for device, start, stop in held
            if not set(range(start, stop)).isdisjoint(tie.layers)
        )
        up_s = down_s = longest_s = 0.0
        for link in problem.links:
            if link.target == first and link.source in later:
                up_s = max(up_s, link.latency_s)
            elif link.source == first and link.target in later:
                down_s = max(down_s, link.latency_s)
            else:
                continue
            longest_s = max(longest_s, tie.bytes / link.bandwidth_bytes_per_s)
        for resource in problem.shared:
            uses = sum(
                ends in {(first, other), (other, first)}
                for other in later
                for ends in {(source, target) for source, target in resource.links}
            )
            longest_s = max(longest_s, tie.bytes * uses / resource.bandwidth_bytes_per_s)
        seconds.append(longest_s + up_s + down_s)
    return math.fsum(seconds)


def check_memory(step: CheckedHybrid, held: Sequence[HeldRange], needs: Sequence[float]) -> Check:
    """Whether each stage's device has the bytes that it needs."""
    for one, need in zip(held, needs, strict=True):
        name = step.ids[one.device]
        has = step.data.devices[name].memory_bytes
        if has is not None and not step.data.fits(name, need):
            detail = f"{name} needs {human_bytes(need)}, it has {human_bytes(has)}"
            return Check(name="memory", ok=False, detail=detail)
    return Check(name="memory", ok=True, detail="every stage fits its device, chunks of sums included")


def check_prediction(
    plan: Plan,
    step: CheckedHybrid,
    held: Sequence[HeldRange],
    iteration_s: float,
    sync_s: float,
    compute_s: Sequence[float],
    needs: Sequence[float],
) -> Check:
    """Whether the plan predicts what was found: seconds of the step, and each stage's computing and bytes."""
    said = plan.predicted
    slack = TOLERANCE * max(iteration_s, 1e-6)
    ok = is_close(said.iteration_s, iteration_s)
    ok = ok and is_close(said.bottleneck_s, max(step.layers_s(one) for one in held))
    ok = ok and abs(said.sync_s - sync_s) <= slack
    ok = ok and [x.device for x in said.replicas] == [step.ids[one.device] for one in held]
    if ok:
        for one, busy_s, need in zip(said.replicas, compute_s, needs, strict=True):
            ok = ok and abs(one.compute_s - busy_s) <= slack
            ok = ok and abs(one.idle_s - max(0.0, iteration_s - busy_s)) <= slack
            ok = ok and is_close(one.memory_bytes, need)
    detail = "played again, its sums as well" if ok else "differs from what its pipelines and sums take"
    return Check(name="prediction", ok=ok, detail=detail)
