"""The result of a verification, and the checks that plans of every parallelism have in common."""

from __future__ import annotations

import math

from skyctl.records.base import Record, Seq
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem

TOLERANCE = 1e-9
"""Relative; what the contract calls equal. A bound holds where no plan is further below it than that."""


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


def is_close(a: float, b: float) -> bool:
    """Whether two figures are what the contract calls equal."""
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-15)


def check_unused(problem: Problem, plan: Plan) -> Check:
    """Every device holds a stage, helps to sum gradients, or is called unused, and no two of these."""
    used = {*(stage.device for stage in plan.placed_stages), *plan.helpers}
    named = [entry.device for entry in plan.unused]
    left = {device.id for device in problem.devices} - used
    for device in sorted(set(named) - left):
        what = "it holds a stage or helps" if device in used else "it is not in the problem"
        return Check(name="unused", ok=False, detail=f"{device} is called unused, but {what}")
    if len(named) != len(set(named)):
        return Check(name="unused", ok=False, detail="a device is called unused twice")
    return Check(
        name="unused",
        ok=True,
        detail=f"{len(left)} of {len(problem.devices)} devices hold no stage and do not help",
    )


def check_certificate(plan: Plan) -> Check:
    """Whether its numbers agree with each other."""
    proof = plan.certificate
    if proof.status == "feasible":
        ok = proof.lower_bound_s is None and proof.gap is None
        return Check(
            name="certificate", ok=ok, detail="feasible, no bound" if ok else "feasible, with a bound"
        )
    if proof.lower_bound_s is None or proof.gap is None:
        return Check(name="certificate", ok=False, detail=f"{proof.status} without a bound and a gap")
    if not proof.lower_bound_s <= proof.value_s * (1 + TOLERANCE):
        return Check(name="certificate", ok=False, detail="the lower bound is above the value")
    if proof.lower_bound_s == 0 and proof.value_s > 0:
        return Check(name="certificate", ok=False, detail=f"{proof.status} with a bound of zero")
    gap = proof.value_s / proof.lower_bound_s - 1 if proof.lower_bound_s > 0 else 0.0
    ok = abs(gap - proof.gap) <= TOLERANCE * max(1.0, gap)
    ok = ok and (proof.status != "optimal" or max(gap, proof.gap) <= TOLERANCE)
    return Check(name="certificate", ok=ok, detail=f"{proof.status}, gap {gap:.3g}")


def check_claims(problem: Problem, plan: Plan) -> list[Check]:
    """Checks what a plan says beside its step: how sure it is, and what a pipeline would take.

    An interval's ends come from draws, and that pipeline is in no record: neither is found again here.
    """
    checks = []
    interval, step_s = plan.predicted.interval, plan.predicted.iteration_s
    if interval is not None:
        used = {stage.device for stage in plan.placed_stages}
        unsure = any(d.id in used and d.time_uncertainty is not None for d in problem.devices)
        ok = (
            unsure
            and interval.low_s <= step_s * (1 + TOLERANCE)
            and step_s * (1 - TOLERANCE) <= interval.high_s
        )
        if not unsure:
            detail = "an interval, and the problem does not say how sure its figures are"
        else:
            detail = (
                f"{interval.low_s:.6g} to {interval.high_s:.6g} s: the step is {'' if ok else 'not '}within"
            )
        checks.append(Check(name="interval", ok=ok, detail=detail))
    if plan.pipeline_iteration_s is not None and problem.parallel != "data":
        checks.append(Check(name="pipeline beside it", ok=False, detail="this is a pipeline itself"))
    return checks


def check_value(plan: Plan, value_s: float) -> Check:
    """Whether the certificate's value, in the problem's objective, is the one that was found."""
    claimed = plan.certificate.value_s
    detail = f"{claimed:.6g} s claimed, {value_s:.6g} s found"
    return Check(name="value", ok=is_close(value_s, claimed), detail=detail)
