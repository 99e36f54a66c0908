"""Re-checks a plan and its certificate from the records alone: one way for every parallelism and rhythm.

Shared with the planner is the contract itself: the records and ``schedule``. Stages, routes, times, memory
and bounds are read and added up anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.errors import InputError
from skyctl.planner.verification.bounds import check_bounds, check_parallelisms
from skyctl.planner.verification.reading import ReadPlan, read_plan, read_stages
from skyctl.planner.verification.round_step import play_round
from skyctl.planner.verification.routes import children
from skyctl.planner.verification.stale_step import check_server, stale_step
from skyctl.planner.verification.step import CheckedStep, StepTimes
from skyctl.planner.verification.verdict import (
    TOLERANCE,
    Check,
    Verdict,
    check_certificate,
    check_claims,
    check_unused,
    check_value,
    is_close,
)
from skyctl.records.base import require_record
from skyctl.records.cluster import node_of
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.schedule.actions import check_in_flight

__all__ = ["read_stages", "verify"]  # the planner reads a pipeline by the same reader


def verify(problem: Problem, plan: Plan) -> Verdict:
    """Checks shape, pins, numbers in flight, memory, sums, predicted times, the certificate and its bound.

    Raises:
        InputError: no problem, or no plan.
    """
    require_record(problem, Problem, "verify")
    require_record(plan, Plan, "verify")
    if problem.rhythm.is_stale and problem.sync == "auto":  # a parameter server's routes are a star
        problem = problem.model_copy(update={"sync": "star"})
    same = problem == plan.problem
    checks = [Check(name="problem", ok=same, detail="as in the plan" if same else "not the plan's problem")]
    checks += check_claims(problem, plan)
    checks += check_parallelisms(problem, plan) if same else []
    checks += _check_plan(problem, plan)
    return Verdict(ok=all(check.ok for check in checks), checks=tuple(checks))


def _check_plan(problem: Problem, plan: Plan) -> list[Check]:
    """Every check of what a plan says; fewer where it can't be read."""
    one_pipeline = problem.parallel == "pipeline" and not problem.rhythm.is_rounds
    name = "stages" if one_pipeline else "pipelines"
    try:
        read = read_plan(problem, plan)
    except InputError as exc:
        return [Check(name=name, ok=False, detail=exc.message)]
    step = CheckedStep(problem)
    if not step.facts.finite():
        return [Check(name=name, ok=False, detail="the problem's times or bytes are too large to add up")]
    in_flight = _in_flight(problem, read)
    checks = [Check(name=name, ok=True, detail=_words(read, len(problem.layers))), in_flight]
    if not in_flight.ok:  # nothing can be played
        return checks
    checks.append(_recompute(problem, read))
    if read.groups:
        checks.append(Check(name="routes", ok=True, detail=f"{len(read.groups)} groups of layers are summed"))
    if problem.rhythm.is_rounds:
        checks += [_local_steps(problem, read), _owners(step, read)]
    checks.append(check_unused(problem, plan))
    if problem.owners is None or not problem.rhythm.is_rounds:
        checks.append(_pins(step, read))
    if len(read.rows) > 1:  # one alone sums what it has cut
        checks.append(_ties(step, read))
    needs = [step.need_bytes(stage, read.groups, read.chunk_bytes) for stage in read.held]
    checks.append(_memory(step, read, needs))
    if problem.parallel == "data":
        checks.append(_helpers(step, plan, read))
    if problem.rhythm.is_stale and read.groups:
        server = stale_step(step, read)
        checks += check_server(plan, server)
        said_s = plan.predicted.iteration_s
        idle_s = tuple(max(0.0, said_s - busy_s) for busy_s in server.compute_s)
        times = StepTimes(said_s, 0.0, server.compute_s, idle_s)
    else:
        times = play_round(step, read) if problem.rhythm.is_rounds else step.play(read)
        largest_s = max(step.layers_s(stage) for stage in read.held)
        checks.append(
            check_value(plan, largest_s if problem.objective == "bottleneck" else times.iteration_s)
        )
    checks += [_prediction(plan, step, read, times, needs), check_certificate(plan)]
    return [*checks, *check_bounds(step, plan)]


def _words(read: ReadPlan, layers: int) -> str:
    """Of stages, shares and local steps."""
    words = f"{len(read.held)} stages of {len(read.rows)} pipelines cover {layers} layers each"
    if len(read.rows) == 1:
        return f"{len(read.held)} stages cover {layers} layers"
    shares = [row[0].microbatches for row in read.rows]
    return f"{words}, and compute {' + '.join(map(str, shares))} microbatches" if len(shares) <= 8 else words


def _in_flight(problem: Problem, read: ReadPlan) -> Check:
    """Whether stages keep as many microbatches in flight, and put off as many, as the schedule has it."""
    for row in read.rows:
        in_flight = [stage.in_flight for stage in row]
        behind = [stage.weights_behind for stage in row]
        wrong = check_in_flight(problem.schedule, in_flight, row[0].microbatches, behind)
        if wrong is not None:
            return Check(name="in flight", ok=False, detail=wrong)
    return Check(name="in flight", ok=True, detail=f"as {problem.schedule} has it")


def _recompute(problem: Problem, read: ReadPlan) -> Check:
    """Stages recompute only where the problem and the parallelism let them, and put nothing off then."""
    side_by_side = problem.parallel == "hybrid" or problem.rhythm.is_rounds
    for number, stage in enumerate(read.held):
        wrong = None
        if stage.recompute and side_by_side:
            wrong = f"stage {number} recomputes; stages of several pipelines do not"
        elif stage.recompute and not problem.recompute:
            wrong = f"stage {number} recomputes, the problem does not allow it"
        elif stage.recompute and stage.weights_behind:
            wrong = f"stage {number} recomputes, and its weight gradients are {stage.weights_behind} behind"
        if wrong is not None:
            return Check(name="recompute", ok=False, detail=wrong)
    count = sum(stage.recompute for stage in read.held)
    return Check(name="recompute", ok=True, detail=f"{count} of {len(read.held)} stages recompute")


def _local_steps(problem: Problem, read: ReadPlan) -> Check:
    asked = problem.rhythm.local_steps
    ok = True
    if isinstance(asked, tuple):
        ok = read.local_steps == asked
    elif isinstance(asked, int):
        ok = set(read.local_steps) == {asked}
    detail = "as the problem asks for" if ok else f"the problem asks for {asked}"
    return Check(name="local steps", ok=ok, detail=detail)


def _owners(step: CheckedStep, read: ReadPlan) -> Check:
    for owner, row in zip(step.problem.owners or (), read.rows, strict=False):
        for stage in row:
            if node_of(step.ids[stage.device]) not in owner:
                detail = f"{step.ids[stage.device]} trains on the data of {'+'.join(owner)}, whose it is not"
                return Check(name="owners", ok=False, detail=detail)
    whose = "no data is anybody's alone" if step.problem.owners is None else "each trains on its own nodes"
    return Check(name="owners", ok=True, detail=whose)


def _pins(step: CheckedStep, read: ReadPlan) -> Check:
    """Whether first and last stages are on devices that may hold them, and helpers hold nothing."""
    for row in read.rows:
        for device, may, where in (
            (row[0].device, step.facts.may_be_first, "first"),
            (row[-1].device, step.facts.may_be_last, "last"),
        ):
            if not may(device):
                detail = f"{step.ids[device]} may not hold the {where} stage"
                return Check(name="pins", ok=False, detail=detail)
    for stage in read.held:
        if step.ids[stage.device] in (step.problem.helpers or ()):
            detail = f"{step.ids[stage.device]} is to help only, and holds layers"
            return Check(name="pins", ok=False, detail=detail)
    return Check(name="pins", ok=True, detail="first and last stages are where they may be")


def _ties(step: CheckedStep, read: ReadPlan) -> Check:
    """Whether layers that share parameters are in one stage."""
    for stage in read.held:
        if step.splits_tie(stage.start, stage.stop):
            detail = f"{step.ids[stage.device]} holds some of the layers that share parameters, not all"
            return Check(name="ties", ok=False, detail=detail)
    return Check(name="ties", ok=True, detail="layers that share parameters are in one stage each")


def _memory(step: CheckedStep, read: ReadPlan, needs: Sequence[float]) -> Check:
    """Whether each stage's device has the bytes that it needs."""
    for stage, need in zip(read.held, needs, strict=True):
        if short := _shortage(step, step.ids[stage.device], need):
            return Check(name="memory", ok=False, detail=short)
    return Check(name="memory", ok=True, detail="every stage fits its device, with messages of sums")


def _helpers(step: CheckedStep, plan: Plan, read: ReadPlan) -> Check:
    """Whether those that only add and pass on have the memory for it."""
    for device in plan.helpers:
        arriving = sum(children(group.trees).get(device, 0) for group in read.groups)
        if short := _shortage(step, device, step.helper_bytes(device, arriving, read.chunk_bytes)):
            return Check(name="helpers", ok=False, detail=short)
    named = ", ".join(plan.helpers) or "none"
    return Check(name="helpers", ok=True, detail=f"that add and pass on: {named}")


def _shortage(step: CheckedStep, device: str, need: float) -> str | None:
    """The memory that is missing, in words; None if the need fits."""
    has = step.devices[device].memory_bytes
    if has is None or step.fits(device, need):
        return None
    return f"{device} needs {need:,.0f} bytes, it has {has:,.0f}"


def _prediction(
    plan: Plan, step: CheckedStep, read: ReadPlan, times: StepTimes, needs: Sequence[float]
) -> Check:
    """Whether the plan predicts what was found: the step, and each stage's computing, idling and bytes."""
    predicted = plan.predicted
    slack = TOLERANCE * max(times.iteration_s, 1e-6)
    ok = is_close(predicted.iteration_s, times.iteration_s)
    ok = ok and is_close(predicted.bottleneck_s, max(step.layers_s(stage) for stage in read.held))
    ok = ok and abs(predicted.sync_s - times.sync_s) <= slack
    ok = ok and [x.device for x in predicted.replicas] == [step.ids[stage.device] for stage in read.held]
    if ok:
        figures = zip(predicted.replicas, times.compute_s, times.idle_s, needs, strict=True)
        for replica, compute_s, idle_s, need in figures:
            # a stage of microseconds beside seconds: its share of a sum's rounding may be more than its own
            near = abs(replica.compute_s - compute_s) <= 1e-3 * slack
            ok = ok and (near or is_close(replica.compute_s, compute_s))
            ok = ok and abs(replica.idle_s - idle_s) <= slack
            ok = ok and is_close(replica.memory_bytes, need)
    return Check(
        name="prediction", ok=ok, detail="played again" if ok else "differs from what was played again"
    )
