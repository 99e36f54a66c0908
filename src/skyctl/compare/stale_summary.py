"""A plan with a parameter server in a sentence: who holds the weights, and what staleness gains or can't."""

from __future__ import annotations

from skyctl.compare.number_format import format_ratio, format_seconds
from skyctl.compare.outcome import device_labels
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.plan import Plan
from skyctl.records.stale_prediction import NOTABLE_GAIN, StalePrediction

MAX_NAMES = 4


def describe_stale(plan: Plan, said: StalePrediction) -> str:
    """Who holds the weights, how far ahead others may be, and what that is worth beside waiting for all."""
    labels = device_labels(plan.problem)
    root = labels[plan.pipelines[0].stages[0].device]
    most = plan.problem.rhythm.staleness
    bound = "any number of steps" if most is None else f"at most {most} step{'s' if most > 1 else ''}"
    sent = sum(
        layer.state_bytes / 4 if layer.gradient_bytes is None else layer.gradient_bytes
        for layer in plan.problem.layers
    )
    text = (
        f"sync: {root} holds the weights and the optimizer; the others push {human_bytes(sent)} of gradients "
        f"and pull as much of weights a step, {bound} ahead of the slowest (changes training)"
    )
    step_s = plan.predicted.iteration_s
    gain = said.synchronous_s / step_s if step_s > 0 else 1.0
    slowest = labels[said.slowest]
    limit = format_seconds(said.bound_s)
    if not said.helps:
        text += (
            f"; staleness can't help here: {slowest} is always the slowest with {limit} a step, and in the "
            "long run all run at its pace"
        )
    elif gain < NOTABLE_GAIN:
        text += (
            f"; steps are hardly faster than with staleness 0 over the same root "
            f"({format_seconds(said.synchronous_s)}), and none are faster than {slowest}'s {limit} on average"
        )
    else:
        text += (
            f"; {format_ratio(gain)} as fast as with staleness 0 over the same root "
            f"({format_seconds(said.synchronous_s)} a step), at most "
            f"{format_ratio(said.synchronous_s / said.bound_s)} with any staleness ({slowest} takes {limit} "
            "on average)"
        )
    if said.unknown:
        named = ", ".join(labels[device] for device in said.unknown[:MAX_NAMES])
        more = f" and {len(said.unknown) - MAX_NAMES} more" if len(said.unknown) > MAX_NAMES else ""
        text += (
            f"; how uneven the steps of {named}{more} are no run has shown: they count as all alike "
            "(a run of 20 steps with --parallel data shows it)"
        )
    return text
