"""Lower bounds, re-derived for ``verify`` from the problem alone, one method after the other.

Each method answers whether a plan exists below a limit: no (proved), yes, or not known. None imports the
planner's own search, model or evaluation; what is shared with them is the contract itself: the records,
``schedule.actions`` (orders, numbers in flight) and ``schedule.simulation``.
"""

from __future__ import annotations

from collections.abc import Callable

from skyctl.planner.verification.problem_data import ProblemData, Proof
from skyctl.planner.verification.proofs import (
    proof_by_paths,
    proof_by_round_trips,
    proof_by_split_backward,
    proof_by_subsets,
    proof_by_witness,
)
from skyctl.planner.verification.verdict import TOLERANCE
from skyctl.records.plan import Certificate, Witness
from skyctl.records.problem import Problem

Method = Callable[[ProblemData, float], Proof]

QUICK: tuple[Method, ...] = (proof_by_subsets.few, proof_by_witness.listed)
LONG: tuple[Method, ...] = (proof_by_subsets.prove,)
"""Some seconds."""


def prove(facts: ProblemData, bound_s: float, witness: Witness | None = None) -> Proof:
    """Whether no plan is better than ``bound_s``, in the problem's objective.

    ``witness``: prices that are evaluated before anything is searched.
    """
    below_s = bound_s * (1 - TOLERANCE)
    methods = ITERATION if facts.problem.objective == "iteration" else (*QUICK, *LONG)
    if facts.split and facts.problem.objective == "iteration":
        methods = SPLIT
    if below_s <= 0:
        return Proof(True, "nothing is below zero")
    if witness is not None and (proof := _by_witness(facts, below_s, witness)).holds:
        return proof
    return _first(methods, facts, below_s)


def is_proved_by_witness(problem: Problem, certificate: Certificate, witness: Witness) -> bool:
    """Whether these prices prove a certificate's bound: only such prices are kept in it."""
    bound_s = certificate.lower_bound_s
    if bound_s is None:
        return False
    return _by_witness(ProblemData(problem), bound_s * (1 - TOLERANCE), witness).holds is True


def _by_witness(facts: ProblemData, below_s: float, witness: Witness) -> Proof:
    stage_s = below_s if facts.problem.objective == "bottleneck" else _stage_limit_s(facts, below_s)
    return proof_by_witness.prove(facts, stage_s, witness)


def _first(methods: tuple[Method, ...], facts: ProblemData, below_s: float) -> Proof:
    """The first answer; where no method knows, all that they said."""
    details = []
    for method in methods:
        proof = method(facts, below_s)
        if proof.holds is False and facts.loose and method is not proof_by_paths.prove:
            proof = Proof(None, "a better plan would exist if stages recomputed in no time")
        if proof.holds is not None:
            return proof
        details.append(proof.detail)
    return Proof(None, "; ".join(details))


def _stage_limit_s(facts: ProblemData, below_s: float) -> float:
    """A step is at least: all microbatches through its slowest stage, and one layer's optimizer."""
    optimizer_s = min(float(facts.columns(d)[2].min()) for d in range(facts.devices))
    return (below_s - optimizer_s) / facts.microbatches


def _volume(facts: ProblemData, below_s: float, methods: tuple[Method, ...] = QUICK) -> Proof:
    """No plan's stages are all fast enough for a step below the limit."""
    stage_s = _stage_limit_s(facts, below_s)
    if stage_s <= 0:
        return Proof(True, "one optimizer step takes as long (volume bound)")
    stages = _first(methods, facts, stage_s)
    if stages.holds:
        return Proof(True, f"no stages are fast enough for a better step (volume bound: {stages.detail})")
    return Proof(None, "its stages alone, without order and links, do not rule a better step out")


def _volume_long(facts: ProblemData, below_s: float) -> Proof:
    return _volume(facts, below_s, LONG)


SPLIT: tuple[Method, ...] = (_volume, proof_by_split_backward.prove, _volume_long)
"""For a step whose weight gradients may be put off: the paths of the others do not hold then."""
ITERATION: tuple[Method, ...] = (_volume, proof_by_round_trips.prove, proof_by_paths.prove, _volume_long)
