"""Whether what a certificate claims to be a bound is one, by the parallelism that it speaks of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyctl.planner.verification.problem_data import Proof
from skyctl.planner.verification.proofs import lower_bound
from skyctl.planner.verification.proofs.data_bound import prove_data
from skyctl.planner.verification.proofs.hybrid_bound_proof import prove_hybrid
from skyctl.planner.verification.step import CheckedStep
from skyctl.planner.verification.verdict import TOLERANCE, Check, is_close
from skyctl.records.plan import ParallelismOutcome, Plan, Witness
from skyctl.records.problem import Problem


def check_bounds(step: CheckedStep, plan: Plan) -> list[Check]:
    """Of the prices of routes that the certificate brings, and of its bound."""
    witness, bound_s = plan.certificate.witness, plan.certificate.lower_bound_s
    checks = _check_prices(step, witness)
    if bound_s is None:
        return [*checks, Check(name="bound", ok=True, detail="none claimed", checked=False)]
    proof = _prove(step, bound_s, witness)
    if proof.holds is None and witness is not None:
        detail = f"its witness does not prove it; {proof.detail}"
        return [*checks, Check(name="bound", ok=False, detail=detail)]
    return [*checks, _check_of("bound", proof)]


def check_parallelisms(problem: Problem, plan: Plan) -> list[Check]:
    """One check for each parallelism that the plan says something of; none where it looked at one alone.

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
            step = CheckedStep(_with_parallelism(problem, outcome))
            checks.append(_check_of(name, _prove(step, bound_s, outcome.witness)))
    return checks


def _check_of(name: str, proof: Proof) -> Check:
    """Not checked where no method knows, with what all of them said."""
    checked = proof.holds is not None
    return Check(name=name, ok=proof.holds is not False, detail=proof.detail, checked=checked)


def _with_parallelism(problem: Problem, outcome: ParallelismOutcome) -> Problem:
    """The problem whose plans the outcome speaks of."""
    update: dict[str, Any] = {"parallel": outcome.parallel}
    if outcome.schedule is not None:
        update["schedule"] = outcome.schedule
    return problem.model_copy(update=update)


def _prove(step: CheckedStep, bound_s: float, witness: Witness | None) -> Proof:
    by_parallelism: dict[str, Callable[[], Proof]] = {
        "pipeline": lambda: lower_bound.prove(step.facts, bound_s, witness),
        "hybrid": lambda: prove_hybrid(step, bound_s, witness),
        "data": lambda: prove_data(step, bound_s, _priced(step, witness)),
    }
    return by_parallelism[step.problem.parallel]()


def _priced(step: CheckedStep, witness: Witness | None) -> dict[frozenset[str], float]:
    """By set of replicas, seconds of a byte that the witness's prices prove."""
    return {
        frozenset(price.devices): step.sums.wires.priced_s(price)
        for price in (witness.route_prices if witness is not None else ())
        if set(price.devices) <= set(step.ids) and len(set(price.devices)) == len(price.devices)
    }


def _check_prices(step: CheckedStep, witness: Witness | None) -> list[Check]:
    """Whether prices of routes prove what they say they do; no check where there are none."""
    if witness is None or not witness.route_prices:
        return []
    proved = _priced(step, witness)
    for price in witness.route_prices:
        proved_s = proved.get(frozenset(price.devices), 0.0)
        if price.byte_s > proved_s * (1 + TOLERANCE):
            detail = (
                f"the prices for {', '.join(price.devices)} prove {proved_s:.6g} s a byte, "
                f"{price.byte_s:.6g} are claimed"
            )
            return [Check(name="prices", ok=False, detail=detail)]
    return [Check(name="prices", ok=True, detail=f"{len(witness.route_prices)} sets' bounds hold")]
