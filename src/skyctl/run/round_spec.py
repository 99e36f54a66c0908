"""What ranks are told of the rounds they make (``worker.local_rounds.RoundOptions``). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyctl.errors import InputError
from skyctl.records.owners import owner_names
from skyctl.records.plan import Plan
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync_format import WEIGHT_FORMATS

LEAST_WAIT_S, PATIENCE = 1800.0, 50.0
"""How long a rank waits for others' local steps: so many seconds at least, and so many predicted rounds. Who
does not answer is found by the supervisor, long before."""


def check_rounds(plan: Plan) -> None:
    """Raises InputError where a plan's rounds are not launched by this version."""
    if plan.problem.rhythm.is_rounds and plan.sync is not None and plan.sync.format not in WEIGHT_FORMATS:
        raise InputError(
            f"weights are averaged as {', '.join(WEIGHT_FORMATS)}, and the plan has {plan.sync.format}",
            hint="plan it again with --local-steps",
        )


def refuse_trace(rhythm: Rhythm | None, *, trace: bool) -> None:
    """Raises InputError where a trace is asked for of rounds: it would show the last local steps alone."""
    if trace and rhythm is not None and rhythm.is_rounds:
        raise InputError("--trace draws single steps, and a round is many", hint="leave --trace out")


def round_structure(plan: Plan, number: int) -> dict[str, Any]:
    """``rounds`` of the payloads of a pipeline's ranks; nothing where gradients are summed in every step."""
    rhythm, owners = plan.problem.rhythm, plan.problem.owners
    if not rhythm.is_rounds:
        return {}
    told: dict[str, Any] = {"steps": plan.pipelines[number].local_steps, "prox_mu": rhythm.prox_mu}
    if owners is not None:
        told |= {
            "owner": owner_names(owners)[number],
            "index": number,
            "owners": len(owners),
            "clients": rhythm.clients_per_round,
            "drop_stragglers": rhythm.drop_stragglers,
            "deadline_s": rhythm.round_deadline_s,
        }
    return {"rounds": told, "timeout_s": max(LEAST_WAIT_S, PATIENCE * plan.predicted.iteration_s)}


def compares_batches(plan: Plan) -> bool:
    """Whether what data() gives is compared between ranks: not where pins or owners say who has it.

    Nor where pipelines make other numbers of local steps: a round then begins with other batches on each.
    """
    problem = plan.problem
    same = len({pipeline.local_steps for pipeline in plan.pipelines}) == 1
    return problem.first_stage is None and problem.last_stage is None and problem.owners is None and same


def with_owner(workload: Mapping[str, Any], structure: Mapping[str, Any]) -> dict[str, Any]:
    """A workload's description as a rank is told it: whose data it trains on, where that is one's alone."""
    owner = (structure.get("rounds") or {}).get("owner")
    return dict(workload) if owner is None else {**workload, "owner": owner}
