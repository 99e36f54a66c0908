"""A plan of rounds, or with a parameter server, in words: who does what, and what that takes or gains."""

from __future__ import annotations

from skyctl.compare.number_format import format_ratio, format_seconds
from skyctl.compare.outcome import device_labels
from skyctl.planner.stage_memory import human_bytes
from skyctl.planner.summed_bytes import gradient_bytes
from skyctl.records.plan import Plan
from skyctl.records.stale_prediction import NOTABLE_GAIN, StalePrediction

MAX_NAMES = 4


def describe_stale(plan: Plan, prediction: StalePrediction) -> str:
    """Which device holds the weights, how far ahead others may be, and the gain over waiting for all."""
    labels = device_labels(plan.problem)
    root = labels[plan.pipelines[0].stages[0].device]
    most = plan.problem.rhythm.staleness
    bound = "any number of steps" if most is None else f"at most {most} step{'s' if most > 1 else ''}"
    sent = sum(map(gradient_bytes, plan.problem.layers))
    text = (
        f"sync: {root} holds the weights and the optimizer; the others push {human_bytes(sent)} of gradients "
        f"and pull as much of weights a step, {bound} ahead of the slowest (changes training)"
    )
    step_s = plan.predicted.iteration_s
    gain = prediction.synchronous_s / step_s if step_s > 0 else 1.0
    slowest = labels[prediction.slowest]
    limit = format_seconds(prediction.bound_s)
    if not prediction.helps:
        text += (
            f"; staleness can't help here: {slowest} is always the slowest with {limit} a step, and in the "
            "long run all run at its pace"
        )
    elif gain < NOTABLE_GAIN:
        text += (
            f"; steps are hardly faster than with staleness 0 over the same root "
            f"({format_seconds(prediction.synchronous_s)}), and none are faster than {slowest}'s {limit} "
            "on average"
        )
    else:
        text += (
            f"; {format_ratio(gain)} as fast as with staleness 0 over the same root "
            f"({format_seconds(prediction.synchronous_s)} a step), at most "
            f"{format_ratio(prediction.synchronous_s / prediction.bound_s)} with any staleness "
            f"({slowest} takes {limit} on average)"
        )
    if prediction.unknown:
        named = ", ".join(labels[device] for device in prediction.unknown[:MAX_NAMES])
        more = (
            f" and {len(prediction.unknown) - MAX_NAMES} more" if len(prediction.unknown) > MAX_NAMES else ""
        )
        text += (
            f"; how uneven the steps of {named}{more} are no run has shown: they count as all alike "
            "(a run of 20 steps with --parallel data shows it)"
        )
    return text


def describe_rounds(plan: Plan) -> list[str]:
    """In words: what a round is, who takes part in it, and what its average takes."""
    rhythm, owners = plan.problem.rhythm, plan.problem.owners
    steps = sorted({pipeline.local_steps or 1 for pipeline in plan.pipelines})
    count = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    who = "owner" if owners is not None else "device"
    sentences = [
        f"changes training: each {who} makes {count} local step{'s' if steps[-1] > 1 else ''} by itself, "
        "then weights are averaged: a round, which the run counts as a step"
    ]
    if rhythm.prox_mu:
        sentences.append(
            f"FedProx: local weights are held near the round's first ones, mu {rhythm.prox_mu:g}"
        )
    if rhythm.has_outer_step:
        sentences.append(
            "DiLoCo: an outer optimizer steps along what each round's average changes, at rate "
            f"{rhythm.outer_lr:g} with Nesterov momentum {rhythm.outer_momentum:g}"
        )
    if owners is not None:
        if rhythm.clients_per_round is not None:
            sentences.append(
                f"clients: {rhythm.clients_per_round} of {len(owners)} owners a round, drawn by the seed"
            )
        late = "dropped" if rhythm.drop_stragglers else "kept, weighted by its samples"
        limit = rhythm.round_deadline_s
        ends = "" if limit is None else f"; an owner ends its part after {format_seconds(limit)}"
        sentences.append(f"stragglers: work of fewer steps than asked is {late}{ends}")
    if plan.sync is not None:
        size = sum(map(gradient_bytes, plan.problem.layers))
        sentences.append(
            f"average: {human_bytes(size)} of weights as {plan.sync.format} take "
            f"{format_seconds(plan.predicted.sync_s)} of a round, and nothing is computed meanwhile"
        )
    return sentences
