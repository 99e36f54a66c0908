"""A plan of rounds in words: what a round is, who takes part in it, and what its average takes."""

from __future__ import annotations

from skyctl.compare.number_format import format_seconds
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.plan import Plan


def describe_rounds(plan: Plan) -> list[str]:
    """In words: what a round is, who takes part in it, and what its average takes."""
    rhythm, owners = plan.problem.rhythm, plan.problem.owners
    steps = sorted({pipeline.local_steps or 1 for pipeline in plan.pipelines})
    count = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    who = "owner" if owners is not None else "device"
    said = [
        f"changes training: each {who} makes {count} local step{'s' if steps[-1] > 1 else ''} by itself, "
        "then weights are averaged: a round, which the run counts as a step"
    ]
    if rhythm.prox_mu:
        said.append(f"FedProx: local weights are held near the round's first ones, mu {rhythm.prox_mu:g}")
    if owners is not None:
        if rhythm.clients_per_round is not None:
            said.append(
                f"clients: {rhythm.clients_per_round} of {len(owners)} owners a round, drawn by the seed"
            )
        late = "dropped" if rhythm.drop_stragglers else "kept, weighted by its samples"
        limit = rhythm.round_deadline_s
        ends = "" if limit is None else f"; an owner ends its part after {format_seconds(limit)}"
        said.append(f"stragglers: work of fewer steps than asked is {late}{ends}")
    if plan.sync is not None:
        size = sum(
            layer.state_bytes / 4 if layer.gradient_bytes is None else layer.gradient_bytes
            for layer in plan.problem.layers
        )
        said.append(
            f"average: {human_bytes(size)} of weights as {plan.sync.format} take "
            f"{format_seconds(plan.predicted.sync_s)} of a round, and nothing is computed meanwhile"
        )
    return said
