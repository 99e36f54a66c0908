"""The outcome of one problem: its value and bound, how its proof was found again, and whether all agrees."""

from __future__ import annotations

import math
import re
import time
from dataclasses import asdict, dataclass
from typing import Any

from skyctl import Plan, Problem, SkyctlError, Verdict, plan, predict, verify
from skyctl.planner.prediction_interval import with_interval
from skyctl.planning.plan_creation import plan_best
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.base import parse
from skyctl.records.plan import Prediction

RELATIVE = 1e-9
DIGITS = 12
"""Of a recorded figure: well beyond what is compared."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a problem.

    Attributes:
        status: of the certificate; or ``exit N``, with the code that the contract gives the error.
        value_s, bound_s: of the certificate; None where there is none.
        proof: how ``verify`` found the bound: ``witness`` (prices that the plan brings), ``search`` (it went
            through what there is by itself), ``unchecked``, ``none`` (none claimed) or ``refused``.
        disagrees: of ``json``, ``verify``, ``predict`` and ``interval`` those that contradict the plan.
        seconds: of a processor, for the plan.
    """

    status: str
    value_s: float | None = None
    bound_s: float | None = None
    proof: str = "none"
    disagrees: str = ""
    seconds: float = 0.0

    @property
    def gap(self) -> float | None:
        """Value ÷ bound − 1; None where there is no bound."""
        if self.value_s is None or not self.bound_s:
            return None
        return self.value_s / self.bound_s - 1

    def row(self) -> list[Any]:
        """As it is recorded."""
        return list(asdict(self).values())

    @classmethod
    def of_row(cls, row: list[Any]) -> Outcome:
        """From what was recorded."""
        return cls(*row)


def made_plan(problem: Problem, strategy: str, limit_s: float) -> Plan:
    """The best plan of a problem; ``strategy`` is ``auto``, else that of the problem's own form."""
    if strategy == "auto":
        return plan_best([problem], PlanOptions(parallel="auto", time_limit_s=limit_s))
    return with_interval(plan(problem, time_limit_s=limit_s))


def observed(
    problem: Problem, strategy: str, limit_s: float, *, checked: bool = True
) -> tuple[Outcome, Plan | None, str]:
    """The outcome of the problem, its plan, and ``verify``'s words for how its bound was found again.

    Args:
        checked: whether the plan is read, predicted and verified again.
    """
    began = time.process_time()
    try:
        made = made_plan(Problem.model_validate(dict(problem)), strategy, limit_s)
    except SkyctlError as exc:
        return Outcome(f"exit {exc.exit_code}", seconds=_spent(began)), None, ""
    spent = _spent(began)
    proof = made.certificate
    value_s, bound_s = _short(proof.value_s), _short(proof.lower_bound_s)
    if not checked:
        return Outcome(proof.status, value_s, bound_s, seconds=spent), made, ""
    verdict = verify(made.problem, made)
    how, words = _proof(made, verdict)
    outcome = Outcome(proof.status, value_s, bound_s, how, _disagreements(made, verdict), spent)
    return outcome, made, words


def _spent(began: float) -> float:
    return float(f"{time.process_time() - began:.2g}")


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.{DIGITS}g}")


def _proof(made: Plan, verdict: Verdict) -> tuple[str, str]:
    """How the bound was found again, and what ``verify`` says of it with its figures and names left out."""
    check = next((one for one in verdict.checks if one.name == "bound"), None)
    if check is None or not check.ok:
        return "refused", ""
    words = re.sub(r"n\d+/cpu:0(,? (and )?n\d+/cpu:0)*", "D", check.detail)
    words = re.sub(r"\d[\d.e+-]*", "N", words)
    if made.certificate.lower_bound_s is None:
        return "none", words
    if not check.checked:
        return "unchecked", words
    return "search" if made.certificate.witness is None else "witness", words


def _disagreements(made: Plan, verdict: Verdict) -> str:
    wrong = []
    again = parse(Plan, made.to_json(), "plan.json")
    if again != made or again.to_json() != made.to_json():
        wrong.append("json")
    if not verdict.ok:
        wrong.append("verify")
    if not _is_same(predict(made.problem, made), made.predicted):
        wrong.append("predict")
    interval, step_s = made.predicted.interval, made.predicted.iteration_s
    if interval is not None and not interval.low_s <= step_s * (1 + RELATIVE) <= interval.high_s * (
        1 + 2 * RELATIVE
    ):
        wrong.append("interval")
    return " ".join(wrong)


def _is_same(found: Prediction, said: Prediction) -> bool:
    """Whether they are equal but for rounding, and the interval that only a plan has."""
    slack = RELATIVE * max(said.iteration_s, 1e-9)
    pairs = [(found.iteration_s, said.iteration_s), (found.bottleneck_s, said.bottleneck_s)]
    pairs += [(found.sync_s, said.sync_s)]
    if [one.device for one in found.replicas] != [one.device for one in said.replicas]:
        return False
    for one, other in zip(found.replicas, said.replicas, strict=True):
        pairs += [(one.compute_s, other.compute_s), (one.idle_s, other.idle_s)]
        if not math.isclose(one.memory_bytes, other.memory_bytes, rel_tol=RELATIVE):
            return False
    return all(math.isclose(a, b, rel_tol=RELATIVE, abs_tol=slack) for a, b in pairs)
