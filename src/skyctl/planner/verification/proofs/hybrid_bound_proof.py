"""Whether a bound on plans of several pipelines holds, for ``verify``: by prices, one by one, by sets."""

from __future__ import annotations

import math

from skyctl.planner.verification.problem_data import Proof
from skyctl.planner.verification.proofs.hybrid_enumeration import prove_by_enumeration
from skyctl.planner.verification.proofs.hybrid_prices import prove_by_prices
from skyctl.planner.verification.proofs.hybrid_sets import prove_by_sets
from skyctl.planner.verification.step import CheckedStep
from skyctl.planner.verification.verdict import TOLERANCE
from skyctl.records.plan import Witness


def prove_hybrid(step: CheckedStep, bound_s: float, witness: Witness | None = None) -> Proof:
    """Whether no two pipelines or more, with rings and stars, have a step below ``bound_s``.

    Args:
        bound_s: infinite: whether none fit at all.
        witness: prices of layers, evaluated before anything is gone through.
    """
    below_s = bound_s * (1 - TOLERANCE)
    if below_s <= 0:
        return Proof(True, "nothing is below zero")
    prices = witness.layer_prices if witness is not None else ()
    by_prices = prove_by_prices(step, below_s, prices) if prices else None
    if by_prices is not None and by_prices.holds:
        return by_prices
    details = [] if by_prices is None else [by_prices.detail]
    for method in (prove_by_enumeration, prove_by_sets):
        proof = method(step, below_s)
        if proof.holds is not None:
            return proof
        details.append(proof.detail)
    return Proof(None, "; ".join(details))


def are_prices_enough(step: CheckedStep, bound_s: float, witness: Witness) -> bool:
    """Whether the witness alone proves a bound."""
    below_s = bound_s * (1 - TOLERANCE)
    return math.isfinite(below_s) and prove_by_prices(step, below_s, witness.layer_prices).holds is True
