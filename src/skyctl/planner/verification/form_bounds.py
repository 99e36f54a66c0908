"""Checks of what a plan says of the forms that it was chosen among: each form's bound is proved again."""

from __future__ import annotations

from typing import Any

from skyctl.planner.verification import lower_bound
from skyctl.planner.verification.data_bound import prove_data
from skyctl.planner.verification.data_step import DataStep
from skyctl.planner.verification.hybrid_bound_proof import prove_hybrid
from skyctl.planner.verification.hybrid_step import CheckedHybrid
from skyctl.planner.verification.problem_data import ProblemData, Proof
from skyctl.planner.verification.verdict import TOLERANCE, Check, is_close
from skyctl.records.plan import FormOutcome, Plan
from skyctl.records.problem import Problem


def check_forms(problem: Problem, plan: Plan) -> list[Check]:
    """One check for each form that the plan says something of; none where one form alone was looked at.

    A bound that can't be proved from the plan is said to be so, and is not wrong.
    """
    checks = []
    for outcome in plan.forms:
        name, step_s, bound_s = f"form {outcome.parallel}", outcome.iteration_s, outcome.lower_bound_s
        if outcome.parallel == problem.parallel and (
            step_s is None or not is_close(step_s, plan.predicted.iteration_s)
        ):
            detail = "the plan is of this form, and its predicted step is another one"
            checks.append(Check(name=name, ok=False, detail=detail))
        elif step_s is not None and bound_s is not None and bound_s > step_s * (1 + TOLERANCE):
            detail = f"no step is below {bound_s:.6g} s, it says, and one of {step_s:.6g} s was found"
            checks.append(Check(name=name, ok=False, detail=detail))
        elif bound_s is None or (problem.helpers and outcome.parallel == "pipeline"):
            # a pipeline's problem leaves out the devices that are to hold nothing
            detail = "no bound claimed" if bound_s is None else "its bound is of fewer devices"
            checks.append(Check(name=name, ok=True, detail=detail, checked=False))
        else:
            found = _prove(_in_form(problem, outcome), bound_s, outcome)
            checks.append(
                Check(
                    name=name,
                    ok=found.holds is not False,
                    detail=found.detail,
                    checked=found.holds is not None,
                )
            )
    return checks


def _in_form(problem: Problem, outcome: FormOutcome) -> Problem:
    """The problem whose plans the outcome speaks of."""
    update: dict[str, Any] = {"parallel": outcome.parallel}
    if outcome.schedule is not None:
        update["schedule"] = outcome.schedule
    return problem.model_copy(update=update)


def _prove(problem: Problem, bound_s: float, outcome: FormOutcome) -> Proof:
    if problem.parallel == "pipeline":
        return lower_bound.prove(ProblemData(problem), bound_s, outcome.witness)
    if problem.parallel == "hybrid":
        return prove_hybrid(CheckedHybrid(problem), bound_s, outcome.witness)
    step = DataStep(problem)
    priced = outcome.witness.route_prices if outcome.witness is not None else ()
    known = [one for one in priced if set(one.devices) <= set(step.devices)]
    return prove_data(step, bound_s, {frozenset(one.devices): step.wires.priced_s(one) for one in known})
