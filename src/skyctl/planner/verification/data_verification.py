"""Checks of a data-parallel plan: shares, memory, routes, the predicted step, and its bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from skyctl.errors import InputError
from skyctl.planner.stage_memory import human_bytes
from skyctl.planner.verification.data_bound import prove_data
from skyctl.planner.verification.data_step import (
    CheckedRoute,
    DataStep,
    Holder,
    StepTimes,
    checked_routes,
    children,
    ways_from_root,
)
from skyctl.planner.verification.route_bound import Wires
from skyctl.planner.verification.stale_step import check_server, stale_step
from skyctl.planner.verification.verdict import (
    Check,
    check_bound,
    check_certificate,
    check_unused,
    check_value,
    is_close,
)
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.records.sync import Sync

TOLERANCE = 1e-9


def check_data_plan(problem: Problem, plan: Plan) -> list[Check]:
    """Every check of a plan whose devices hold all layers each; fewer where it can't be read."""
    try:
        holders = _read_holders(problem, plan)
        trees = _read_trees(problem, plan, [holder.device for holder in holders])
    except InputError as exc:
        return [Check(name="pipelines", ok=False, detail=exc.message)]
    shares = " + ".join(str(holder.microbatches) for holder in holders)
    step = DataStep(problem)
    chunk_bytes = Sync.model_fields["chunk_bytes"].default if plan.sync is None else plan.sync.chunk_bytes
    arriving = children(trees)
    needs = [step.need_bytes(x.device, x.recompute, arriving.get(x.device, 0), chunk_bytes) for x in holders]
    times = step.play(holders, trees, chunk_bytes)
    value = [check_value(plan, times.iteration_s)]
    if problem.rhythm.is_stale and trees:
        server = stale_step(step, holders, trees)
        value = check_server(plan, holders, server)
        times = StepTimes(plan.predicted.iteration_s, 0.0, server.compute_s)
    return [
        Check(name="pipelines", ok=True, detail=f"{len(holders)} holders compute {shares} microbatches"),
        Check(name="routes", ok=True, detail=f"{len(trees)} over all holders"),
        _recompute(problem, holders),
        check_unused(problem, plan),
        _pins(step, holders),
        _memory(step, holders, needs),
        _helpers(step, plan, arriving, chunk_bytes),
        *value,
        _prediction(plan, step, holders, times, needs),
        check_certificate(plan),
        *_bounds(step, plan),
    ]


def _read_holders(problem: Problem, plan: Plan) -> list[Holder]:
    """Raises InputError where pipelines are no holders of all layers, or shares not the step's."""
    if problem.schedule not in ("1f1b", "sequential") or problem.objective != "iteration":
        raise InputError(
            f"no data-parallel plan has schedule {problem.schedule}, objective {problem.objective}"
        )
    known = {device.id for device in problem.devices}
    holders = []
    for number, pipeline in enumerate(plan.pipelines):
        stage = pipeline.stages[0]
        if len(pipeline.stages) != 1 or (stage.start, stage.stop) != (0, len(problem.layers)):
            raise InputError(f"pipeline {number} is not one stage of all {len(problem.layers)} layers")
        if stage.device not in known:
            raise InputError(f"the plan names device {stage.device!r}, which is not in the problem")
        if stage.in_flight != 1 or stage.weights_behind:
            raise InputError(
                f"{stage.device} keeps {stage.in_flight} microbatches in flight; alone it is one"
            )
        holders.append(Holder(stage.device, pipeline.microbatches, stage.recompute))
    total = sum(holder.microbatches for holder in holders)
    if total != problem.microbatches:
        raise InputError(f"the shares add up to {total} microbatches, the problem has {problem.microbatches}")
    if len({holder.device for holder in holders}) != len(holders):
        raise InputError("a device holds the layers twice")
    return holders


def _read_trees(problem: Problem, plan: Plan, holders: Sequence[str]) -> tuple[CheckedRoute, ...]:
    """Raises InputError where the routes do not bring every holder the sum of all, or go over others.

    Others than those that may help, or that do nothing there.
    """
    sync = plan.sync
    if len(holders) == 1:
        if sync is not None:
            raise InputError("one holder alone has nothing to sum")
        return ()
    if sync is None:
        raise InputError("nothing says how the holders' gradients are summed")
    if sync.format != problem.sync_format:
        raise InputError(f"gradients are sent as {sync.format}, the problem says {problem.sync_format}")
    if sync.uncompressed_steps != problem.sync_uncompressed_steps:
        raise InputError(
            f"{sync.uncompressed_steps} steps are uncompressed, the problem says "
            f"{problem.sync_uncompressed_steps}"
        )
    if len(sync.groups) != 1 or (sync.groups[0].start, sync.groups[0].stop) != (0, len(problem.layers)):
        raise InputError("the holders' layers are not one sync group")
    trees = checked_routes(sync.groups[0].routes)
    if abs(math.fsum(tree.share for tree in trees) - 1) > TOLERANCE:
        raise InputError("the routes' shares do not add up to 1")
    may_help = set(Wires(problem).may_help)
    for number, tree in enumerate(trees):
        for edges, child in ((tree.up, 0), (tree.down, 1)):
            reached = [tree.root, *(edge[child] for edge in edges)]
            named = {tree.root, *(device for edge in edges for device in edge)}
            if len(set(reached)) < len(reached) or named != set(reached) or not set(holders) <= named:
                raise InputError(f"route {number} does not go to each holder once, and to nobody else")
            if helper := sorted(named - set(holders) - may_help):
                raise InputError(f"route {number} goes over {helper[0]}, which may not help to sum")
            inner = {tree.root, *(edge[1 - child] for edge in edges)}
            if idle := sorted(named - set(holders) - inner):
                raise InputError(f"route {number} ends at {idle[0]}, which holds nothing")
            if len(ways_from_root(edges, tree.root, child, {})) < len(named):
                raise InputError(f"route {number} has no way between its root {tree.root} and some holder")
    return trees


def _recompute(problem: Problem, holders: Sequence[Holder]) -> Check:
    count = sum(holder.recompute for holder in holders)
    if count and not problem.recompute:
        return Check(name="recompute", ok=False, detail="a holder recomputes, the problem does not allow it")
    return Check(name="recompute", ok=True, detail=f"{count} of {len(holders)} holders recompute")


def _pins(step: DataStep, holders: Sequence[Holder]) -> Check:
    for holder in holders:
        if not step.allowed(holder.device):
            detail = f"{holder.device} may not hold the first or the last layer"
            return Check(name="pins", ok=False, detail=detail)
    return Check(name="pins", ok=True, detail="every holder may hold the first and the last layer")


def _memory(step: DataStep, holders: Sequence[Holder], needs: Sequence[float]) -> Check:
    for holder, need in zip(holders, needs, strict=True):
        has = step.devices[holder.device].memory_bytes
        if has is not None and not step.fits(holder.device, need):
            detail = f"{holder.device} needs {human_bytes(need)}, it has {human_bytes(has)}"
            return Check(name="memory", ok=False, detail=detail)
    return Check(name="memory", ok=True, detail="all layers fit on every holder")


def _helpers(step: DataStep, plan: Plan, arriving: Mapping[str, int], chunk_bytes: int) -> Check:
    """Whether those that only add and pass on have the memory for it."""
    for device in plan.helpers:
        need = step.helper_bytes(device, arriving.get(device, 0), chunk_bytes)
        has = step.devices[device].memory_bytes
        if has is not None and not step.fits(device, need):
            detail = f"{device} needs {human_bytes(need)} to help, it has {human_bytes(has)}"
            return Check(name="helpers", ok=False, detail=detail)
    named = ", ".join(plan.helpers) or "none"
    return Check(name="helpers", ok=True, detail=f"that add and pass on: {named}")


def _prediction(
    plan: Plan, step: DataStep, holders: Sequence[Holder], times: StepTimes, needs: Sequence[float]
) -> Check:
    said = plan.predicted
    largest_s = max(
        math.fsum(forward) + math.fsum(backward)
        for forward, backward, _ in (step.layer_times(x.device, x.recompute) for x in holders)
    )
    slack = TOLERANCE * max(times.iteration_s, 1e-6)
    ok = is_close(said.iteration_s, times.iteration_s) and is_close(said.bottleneck_s, largest_s)
    ok = ok and abs(said.sync_s - times.sync_s) <= slack
    ok = ok and [x.device for x in said.replicas] == [x.device for x in holders]
    if ok:
        for one, compute_s, need in zip(said.replicas, times.compute_s, needs, strict=True):
            ok = ok and abs(one.compute_s - compute_s) <= slack
            ok = ok and abs(one.idle_s - (times.iteration_s - compute_s)) <= slack
            ok = ok and is_close(one.memory_bytes, need)
    detail = "added up again" if ok else "differs from what its shares and routes take"
    return Check(name="prediction", ok=ok, detail=detail)


def _bounds(step: DataStep, plan: Plan) -> list[Check]:
    """Of the prices that the certificate brings, and of its bound."""
    witness = plan.certificate.witness
    priced = witness.route_prices if witness is not None else ()
    byte_s: dict[frozenset[str], float] = {}
    checks = []
    for one in priced:
        found_s = 0.0
        if set(one.devices) <= set(step.devices) and len(set(one.devices)) == len(one.devices):
            found_s = byte_s[frozenset(one.devices)] = step.wires.priced_s(one)
        if one.byte_s > found_s * (1 + TOLERANCE):
            detail = (
                f"the prices for {', '.join(one.devices)} prove {found_s:.6g} s a byte, "
                f"{one.byte_s:.6g} are claimed"
            )
            checks.append(Check(name="prices", ok=False, detail=detail))
            break
    else:
        if priced:
            checks.append(Check(name="prices", ok=True, detail=f"{len(priced)} sets' bounds hold"))
    unproved = "its prices do" if byte_s else None
    return [*checks, check_bound(plan, lambda bound_s: prove_data(step, bound_s, byte_s), unproved)]
