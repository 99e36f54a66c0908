"""Checks of a plan of several pipelines: shape, memory, what is summed, the predicted step, and its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skyctl.errors import InputError
from skyctl.planner.stage_memory import human_bytes
from skyctl.planner.verification.data_step import CheckedRoute, checked_routes, ring_and_stars
from skyctl.planner.verification.hybrid_bound_proof import prove_hybrid
from skyctl.planner.verification.hybrid_step import CheckedHybrid, HeldRange, HybridTimes, SummedRange
from skyctl.planner.verification.verdict import (
    TOLERANCE,
    Check,
    check_certificate,
    check_unused,
    is_close,
)
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.sync import Sync
from skyctl.schedule.actions import check_in_flight

Rows = list[list[HeldRange]]


def check_hybrid_plan(problem: Problem, plan: Plan) -> list[Check]:
    """Every check of a plan whose pipelines have cuts of their own; fewer where it can't be read."""
    try:
        _require_hybrid(problem)
        rows = _read_rows(problem, plan)
        step = CheckedHybrid(problem)
        groups = _read_groups(step, plan, rows)
    except InputError as exc:
        return [Check(name="pipelines", ok=False, detail=exc.message)]
    if not step.facts.finite():
        return [
            Check(name="pipelines", ok=False, detail="the problem's times or bytes are too large to add up")
        ]
    chunk_bytes = Sync.model_fields["chunk_bytes"].default if plan.sync is None else plan.sync.chunk_bytes
    held = [one for row in rows for one in row]
    needs = [step.need_bytes(one, groups, chunk_bytes) for one in held]
    times = step.play(rows, groups)
    claimed = plan.certificate.value_s
    shares = " + ".join(str(row[0].microbatches) for row in rows)
    return [
        Check(name="pipelines", ok=True, detail=f"{len(rows)} pipelines compute {shares} microbatches"),
        Check(name="routes", ok=True, detail=f"{len(groups)} groups of layers, each a ring or a star"),
        check_unused(problem, plan),
        _pins(step, rows),
        _ties(step, held),
        _memory(step, held, needs),
        Check(
            name="value",
            ok=is_close(times.iteration_s, claimed),
            detail=f"{claimed:.6g} s claimed, {times.iteration_s:.6g} s found",
        ),
        _prediction(plan, step, held, times, needs),
        check_certificate(plan),
        _bound(step, plan),
    ]


def _require_hybrid(problem: Problem) -> None:
    """Raises InputError where the problem asks for what several pipelines do not have."""
    if problem.schedule not in ("1f1b", "sequential") or problem.objective != "iteration":
        raise InputError(f"no hybrid has schedule {problem.schedule}, objective {problem.objective}")
    if problem.sync in ("trees", "server") or problem.helpers:
        raise InputError("hybrids sum over rings and stars, without helpers")


def _read_rows(problem: Problem, plan: Plan) -> Rows:
    """Raises InputError where these are no pipelines over all layers, or shares not the step's."""
    index = {device.id: d for d, device in enumerate(problem.devices)}
    if len(plan.pipelines) < 2:
        raise InputError("a hybrid has two pipelines or more, the plan has one")
    rows: Rows = []
    for number, pipeline in enumerate(plan.pipelines):
        at, row = 0, []
        for stage in pipeline.stages:
            if stage.device not in index:
                raise InputError(f"the plan names device {stage.device!r}, which is not in the problem")
            if stage.recompute:
                raise InputError(f"{stage.device} recomputes; stages of hybrids do not")
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
    total = sum(row[0].microbatches for row in rows)
    if total != problem.microbatches:
        raise InputError(f"the shares add up to {total} microbatches, the problem has {problem.microbatches}")
    devices = [one.device for row in rows for one in row]
    if len(set(devices)) < len(devices):
        twice = next(d for d in devices if devices.count(d) > 1)
        raise InputError(f"{problem.devices[twice].id} holds more than one stage")
    return rows


def _read_groups(step: CheckedHybrid, plan: Plan, rows: Rows) -> list[SummedRange]:
    """Raises InputError where the groups are not what the same devices hold, or routes no ring or star."""
    problem, sync = step.problem, plan.sync
    if sync is None:
        raise InputError("nothing says how the pipelines' gradients are summed")
    if sync.format != problem.sync_format:
        raise InputError(f"gradients are sent as {sync.format}, the problem says {problem.sync_format}")
    if sync.uncompressed_steps != problem.sync_uncompressed_steps:
        raise InputError(
            f"{sync.uncompressed_steps} steps are uncompressed, the problem says "
            f"{problem.sync_uncompressed_steps}"
        )
    wanted = step.groups(rows)
    said = [(group.start, group.stop) for group in sync.groups]
    if said != [(start, stop) for start, stop, _ in wanted]:
        ranges = ", ".join(f"[{start}, {stop})" for start, stop, _ in wanted)
        raise InputError(f"the sync groups are not the layers that the same devices hold: {ranges}")
    out = []
    for group, (start, stop, devices) in zip(sync.groups, wanted, strict=True):
        trees = checked_routes(group.routes)
        if not any(are_same_routes(trees, other) for other in ring_and_stars(devices, problem.sync)):
            raise InputError(
                f"the routes of layers [{start}, {stop}) are no ring or star of {', '.join(devices)}"
                + (f", as sync {problem.sync} asks for" if problem.sync != "auto" else "")
            )
        out.append(SummedRange(start, stop, trees))
    return out


def are_same_routes(trees: Sequence[CheckedRoute], others: Sequence[CheckedRoute]) -> bool:
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


def _pins(step: CheckedHybrid, rows: Rows) -> Check:
    for number, row in enumerate(rows):
        for one, may, where in (
            (row[0], step.facts.may_be_first, "first"),
            (row[-1], step.facts.may_be_last, "last"),
        ):
            if not may(one.device):
                detail = f"{step.ids[one.device]} may not hold the {where} stage of pipeline {number}"
                return Check(name="pins", ok=False, detail=detail)
    return Check(name="pins", ok=True, detail="every pipeline's first and last stage are where they may be")


def _ties(step: CheckedHybrid, held: Sequence[HeldRange]) -> Check:
    for one in held:
        if step.splits_tie(one.start, one.stop):
            detail = f"{step.ids[one.device]} holds some of the layers that share parameters, not all"
            return Check(name="ties", ok=False, detail=detail)
    return Check(name="ties", ok=True, detail="layers that share parameters are in one stage each")


def _memory(step: CheckedHybrid, held: Sequence[HeldRange], needs: Sequence[float]) -> Check:
    for one, need in zip(held, needs, strict=True):
        name = step.ids[one.device]
        has = step.data.devices[name].memory_bytes
        if has is not None and not step.data.fits(name, need):
            detail = f"{name} needs {human_bytes(need)}, it has {human_bytes(has)}"
            return Check(name="memory", ok=False, detail=detail)
    return Check(name="memory", ok=True, detail="every stage fits its device, chunks of sums included")


def _prediction(
    plan: Plan, step: CheckedHybrid, held: Sequence[HeldRange], times: HybridTimes, needs: Sequence[float]
) -> Check:
    said = plan.predicted
    slack = TOLERANCE * max(times.iteration_s, 1e-6)
    ok = is_close(said.iteration_s, times.iteration_s)
    ok = ok and is_close(said.bottleneck_s, max(step.layers_s(one) for one in held))
    ok = ok and abs(said.sync_s - times.sync_s) <= slack
    ok = ok and [x.device for x in said.replicas] == [step.ids[one.device] for one in held]
    if ok:
        for one, compute_s, need in zip(said.replicas, times.compute_s, needs, strict=True):
            ok = ok and abs(one.compute_s - compute_s) <= slack
            ok = ok and abs(one.idle_s - (times.iteration_s - compute_s)) <= slack
            ok = ok and is_close(one.memory_bytes, need)
    detail = "simulated again, its sums as well" if ok else "differs from what its pipelines and sums take"
    return Check(name="prediction", ok=ok, detail=detail)


def _bound(step: CheckedHybrid, plan: Plan) -> Check:
    bound_s, witness = plan.certificate.lower_bound_s, plan.certificate.witness
    if bound_s is None:
        return Check(name="bound", ok=True, detail="none claimed", checked=False)
    found = prove_hybrid(step, bound_s, witness)
    if found.holds is None and witness is not None:
        return Check(name="bound", ok=False, detail=f"its witness does not prove it; {found.detail}")
    return Check(
        name="bound", ok=found.holds is not False, detail=found.detail, checked=found.holds is not None
    )
