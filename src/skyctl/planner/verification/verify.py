"""Re-checks a plan and its certificate from the records alone (the bound's proof is in ``proofs.py``)."""

from __future__ import annotations

import itertools
import math

from skyctl.errors import InputError
from skyctl.planner import memory
from skyctl.planner.evaluate import play
from skyctl.planner.model import Model, Piece
from skyctl.planner.verification import proofs
from skyctl.records.base import Record, Seq
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.schedule.actions import check_in_flight

TOLERANCE = 1e-9
"""Relative; what the contract calls equal."""


class Check(Record):
    """One thing that was looked at. ``checked`` False: it can't be checked here, and ``detail`` says why."""

    name: str
    ok: bool
    detail: str
    checked: bool = True


class Verdict(Record):
    """``ok``: nothing that was checked fails."""

    ok: bool
    checks: Seq[Check]


def grid(model: Model, plan: Plan) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """(pieces, in-flight numbers) of a plan with one replica a stage.

    Raises:
        InputError: see ``api.predict``.
    """
    pieces: list[Piece] = []
    flying: list[int] = []
    for number, stage in enumerate(plan.stages):
        if len(stage.replicas) != 1:
            raise InputError(f"stage {number} has {len(stage.replicas)} replicas; version 1 has one a stage")
        replica = stage.replicas[0]
        if replica.device not in model.ids:
            raise InputError(f"the plan names device {replica.device!r}, which is not in the problem")
        if replica.microbatches != model.microbatches:
            raise InputError(
                f"stage {number} runs {replica.microbatches} microbatches, "
                f"the problem has {model.microbatches}"
            )
        if not 1 <= replica.in_flight <= model.microbatches:
            raise InputError(
                f"stage {number} keeps {replica.in_flight} in flight, it may be 1 to {model.microbatches}"
            )
        pieces.append(Piece(model.index(replica.device), stage.start, stage.stop))
        flying.append(replica.in_flight)
    if pieces[-1].stop != model.layers:
        raise InputError(f"the plan covers {pieces[-1].stop} layers, the problem has {model.layers}")
    if any(later > earlier for earlier, later in itertools.pairwise(flying)):
        raise InputError(
            "the plan's in-flight numbers grow along the pipeline; its stages would wait for ever"
        )
    return tuple(pieces), tuple(flying)


def verify(problem: Problem, plan: Plan) -> Verdict:
    """Checks shape, pins, in-flight numbers, memory, the predicted times, the certificate and its bound."""
    checks: list[Check] = []
    model = Model(problem)
    same = problem == plan.problem
    checks.append(
        Check(name="problem", ok=same, detail="as in the plan" if same else "not the plan's problem")
    )
    try:
        pieces, flying = grid(model, plan)
    except InputError as exc:
        checks.append(Check(name="stages", ok=False, detail=exc.message))
        return Verdict(ok=False, checks=tuple(checks))
    checks.append(Check(name="stages", ok=True, detail=f"{len(pieces)} stages cover {model.layers} layers"))
    wrong = check_in_flight(problem.schedule, list(flying), problem.microbatches)
    checks.append(Check(name="in flight", ok=wrong is None, detail=wrong or f"as {problem.schedule} has it"))
    checks.append(_pins(problem, plan))
    checks.append(_memory(problem, plan))
    checks.append(_value(model, plan, pieces, flying))
    checks.append(_prediction(model, plan, pieces, flying))
    checks.append(_certificate(plan))
    checks.append(_bound(problem, plan))
    return Verdict(ok=all(check.ok for check in checks), checks=tuple(checks))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-15)


def _pins(problem: Problem, plan: Plan) -> Check:
    for names, stage, where in (
        (problem.first_stage, plan.stages[0], "first"),
        (problem.last_stage, plan.stages[-1], "last"),
    ):
        device = stage.replicas[0].device
        if names is not None and device not in names:
            return Check(name="pins", ok=False, detail=f"{device} may not hold the {where} stage")
    return Check(name="pins", ok=True, detail="first and last stage are where they may be")


def _memory(problem: Problem, plan: Plan) -> Check:
    devices = {device.id: device for device in problem.devices}
    for stage in plan.stages:
        replica = stage.replicas[0]
        device = devices[replica.device]
        need = memory.device_bytes(problem, device, stage.start, stage.stop, replica.in_flight)
        if not memory.fits(need, device):
            assert device.memory_bytes is not None
            detail = f"{device.id} needs {memory.human(need)}, it has {memory.human(device.memory_bytes)}"
            return Check(name="memory", ok=False, detail=detail)
    return Check(name="memory", ok=True, detail="every stage fits its device")


def _value(model: Model, plan: Plan, pieces: tuple[Piece, ...], flying: tuple[int, ...]) -> Check:
    if model.problem.objective == "bottleneck":
        value = proofs.bottleneck_s(model.problem, [(model.ids[d], p, q) for d, p, q in pieces])
    else:
        value = play(model, pieces, flying).iteration_s
    claimed = plan.certificate.value_s
    detail = f"{claimed:.6g} s claimed, {value:.6g} s found"
    return Check(name="value", ok=_close(value, claimed), detail=detail)


def _prediction(model: Model, plan: Plan, pieces: tuple[Piece, ...], flying: tuple[int, ...]) -> Check:
    step = play(model, pieces, flying)
    said = plan.predicted
    named = [replica.device for replica in said.replicas]
    ok = _close(said.iteration_s, step.iteration_s)
    ok = ok and _close(
        said.bottleneck_s, proofs.bottleneck_s(model.problem, [(model.ids[d], p, q) for d, p, q in pieces])
    )
    ok = ok and named == [model.ids[d] for d, _, _ in pieces]
    if ok:
        for s, replica in enumerate(said.replicas):
            device = model.problem.devices[pieces[s].device]
            need = memory.device_bytes(model.problem, device, pieces[s].start, pieces[s].stop, flying[s])
            slack = 1e-9 * max(1.0, step.iteration_s)
            ok = ok and _close(replica.compute_s, step.compute_s[s])
            ok = ok and abs(replica.idle_s - step.idle_s[s]) <= slack and _close(replica.memory_bytes, need)
    return Check(name="prediction", ok=ok, detail="simulated again" if ok else "differs from the simulation")


def _certificate(plan: Plan) -> Check:
    proof = plan.certificate
    if proof.status == "feasible":
        ok = proof.lower_bound_s is None and proof.gap is None and proof.status == "feasible"
        return Check(name="certificate", ok=ok, detail=f"{proof.status}: no bound is claimed")
    if proof.lower_bound_s is None or proof.gap is None:
        return Check(name="certificate", ok=False, detail=f"{proof.status} without a bound and a gap")
    if proof.lower_bound_s > proof.value_s * (1 + TOLERANCE):
        return Check(name="certificate", ok=False, detail="the lower bound is above the value")
    gap = proof.value_s / proof.lower_bound_s - 1 if proof.lower_bound_s > 0 else 0.0
    ok = abs(gap - proof.gap) <= TOLERANCE and (proof.status != "optimal" or proof.gap <= TOLERANCE)
    if proof.lower_bound_s == 0 and proof.value_s > 0:
        ok = False
    return Check(name="certificate", ok=ok, detail=f"{proof.status}, gap {gap:.3g}")


def _bound(problem: Problem, plan: Plan) -> Check:
    bound = plan.certificate.lower_bound_s
    if bound is None:
        return Check(name="bound", ok=True, detail="none claimed", checked=False)
    found = proofs.prove(problem, bound)
    return Check(
        name="bound", ok=found.holds is not False, detail=found.detail, checked=found.holds is not None
    )
