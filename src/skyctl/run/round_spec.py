"""The rounds that ranks are ordered to make, and how long they wait for each other. Pure."""

from __future__ import annotations

from dataclasses import replace

from skyctl.errors import InputError
from skyctl.records.owners import owner_names
from skyctl.records.plan import Plan
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync_format import WEIGHT_FORMATS
from skyctl.worker.rank_order import RoundOptions

LEAST_WAIT_S, MOST_WAIT_S, PATIENCE = 1800.0, 1e6, 50.0
"""How long a rank waits for a peer: so many seconds at least and at most, and so many predicted steps."""


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


def refuse_patience(*, owners: bool, patience: int | None) -> None:
    """Raises InputError where owners' own validations, which no other owner knows of, were to end the run."""
    if owners and patience is not None:
        raise InputError(
            f"--patience {patience} does not go with --owners: each owner validates with data of its own",
            hint="leave --patience out, and stop the run when you like: skyctl stop RUN",
        )


def round_options(plan: Plan, number: int) -> RoundOptions | None:
    """The rounds of a pipeline's ranks; None if gradients are summed in every step."""
    rhythm, owners = plan.problem.rhythm, plan.problem.owners
    if not rhythm.is_rounds:
        return None
    local_steps = plan.pipelines[number].local_steps
    assert local_steps is not None, "a pipeline of such a plan has them"
    options = RoundOptions(
        steps=local_steps,
        prox_mu=rhythm.prox_mu,
        outer_lr=rhythm.outer_lr,
        outer_momentum=rhythm.outer_momentum,
    )
    if owners is None:
        return options
    return replace(
        options,
        owner=owner_names(owners)[number],
        index=number,
        owners=len(owners),
        clients=rhythm.clients_per_round,
        drop_stragglers=rhythm.drop_stragglers,
        deadline_s=rhythm.round_deadline_s,
    )


def patience_s(plan: Plan, steps: int) -> float:
    """The longest that a rank waits for a peer: for its local steps, or the steps that it may be behind.

    The supervisor finds a rank that does not answer long before.

    Args:
        steps: of the run; with a parameter server, all of them may lie between two ranks that meet.
    """
    rhythm = plan.problem.rhythm
    step_s = plan.predicted.iteration_s
    if rhythm.is_rounds:
        return max(LEAST_WAIT_S, PATIENCE * step_s)
    if rhythm.is_stale:
        behind = steps if rhythm.staleness is None else min(steps, rhythm.staleness + 1)
        return min(MOST_WAIT_S, max(LEAST_WAIT_S, PATIENCE * behind * step_s))
    return LEAST_WAIT_S


def compares_batches(plan: Plan) -> bool:
    """Whether what data() gives is compared between ranks: not where pins or owners say who has it.

    Nor where pipelines make other numbers of local steps: a round then begins with other batches on each.
    """
    problem = plan.problem
    same = len({pipeline.local_steps for pipeline in plan.pipelines}) == 1
    return problem.first_stage is None and problem.last_stage is None and problem.owners is None and same
