"""A step's seconds as one plan's can be held against another's, whatever the rhythms of both.

Two things make them comparable. A round trains on the samples of several synchronous steps: its seconds are
divided by their number. And what staleness gains shows in the long run only, as it is in stalls that come now
and then: beside a plan with a parameter server all steps are taken on average, as predicted and as measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist, fmean, stdev

from skyctl.planner.drawn_steps import long_run_step_s
from skyctl.records.interval import INTERVAL_SHARE, Interval
from skyctl.records.measurement import Measurement, Quantiles
from skyctl.records.plan import Plan

StepVariation = Mapping[str, Sequence[float]]
"""By device, how uneven its steps are (``Device.step_factors``); those whose steps are even are left out."""


def uneven_steps(plans: Iterable[Plan | None]) -> StepVariation | None:
    """How uneven devices' steps are, where one of the plans has a parameter server; None: none has."""
    stale = [plan.problem for plan in plans if plan is not None and plan.predicted.stale is not None]
    if not stale:
        return None
    return {
        device.id: device.step_factors
        for problem in stale
        for device in problem.devices
        if device.step_factors
    }


def predicted_step_s(plan: Plan, uneven: StepVariation | None) -> float:
    """Predicted seconds for the samples of a step. ``uneven``: ``uneven_steps`` of all that is compared."""
    return plan.step_s if uneven is None else long_run_step_s(plan, uneven)


def predicted_interval(plan: Plan, uneven: StepVariation | None) -> Interval | None:
    """The interval in which ``predicted_step_s`` may lie; None: unknown, as it is on average."""
    interval = plan.predicted.interval
    if interval is None or uneven is not None:
        return None
    steps = plan.steps_per_iteration
    return Interval(low_s=interval.low_s / steps, high_s=interval.high_s / steps)


def measured_steps(plan: Plan, done: Measurement) -> Quantiles:
    """The quantiles of a run's steps, each as long as it would be for the samples of a synchronous one."""
    took, steps = done.iteration_s, plan.steps_per_iteration
    return Quantiles(median=took.median / steps, p10=took.p10 / steps, p90=took.p90 / steps)


def mean_step_s(plan: Plan, done: Measurement) -> float:
    """A run's step on average, without the first; with a parameter server over all devices."""
    mean_s = done.mean_iteration_s
    return (fmean(_settled(done)) if mean_s is None else mean_s) / plan.steps_per_iteration


def measured_step_s(plan: Plan, done: Measurement | None, uneven: StepVariation | None) -> float | None:
    """Seconds of a run's step that are compared: the median, or beside a parameter server the mean.

    Args:
        done: the run; None: there was none, and there are no seconds.
        uneven: ``uneven_steps`` of all that is compared.
    """
    if done is None:
        return None
    return measured_steps(plan, done).median if uneven is None else mean_step_s(plan, done)


def ratio_errors(base: Measurement, other: Measurement, *, of_means: bool) -> tuple[float, float]:
    """How far the logarithm of (a step of ``other`` ÷ one of ``base``) may be too high, and too low.

    With the probability of an ``Interval``; errors of the two runs are independent. ``of_means``: steps on
    average are compared, else medians.
    """
    errors = _mean_errors if of_means else median_errors
    (base_below, base_above), (below, above) = errors(base), errors(other)
    return math.hypot(below, base_above), math.hypot(above, base_below)


def _settled(done: Measurement) -> list[float]:
    return [step.iteration_s for step in done.steps[1:] or done.steps]


def _mean_errors(run: Measurement) -> tuple[float, float]:
    """As ``median_errors``, of a run's mean step, as if its steps were independent of each other."""
    steps = _settled(run)
    mean_s = fmean(steps)
    if len(steps) < 2 or mean_s <= 0:
        return 0.0, 0.0
    error = NormalDist().inv_cdf((1 + INTERVAL_SHARE) / 2) * stdev(steps) / math.sqrt(len(steps)) / mean_s
    return error, error


def median_errors(run: Measurement) -> tuple[float, float]:
    """How far the logarithm of a run's median step may be too high, and too low.

    Between two of the steps by rank, whatever their distribution is (Hoefler and Belli 2015, section 3.1.3):
    a few slow steps do not widen it. Fewer than four steps after the first have no ranks that far apart;
    then it is their whole range.
    """
    ordered = sorted(_settled(run))
    count, rank, outside = len(ordered), 0, 0.0
    while rank < (count - 1) // 2:
        outside += 2 * math.comb(count, rank) / 2**count  # that the median is beyond the next two by rank
        if outside + 2 * math.comb(count, rank + 1) / 2**count > 1 - INTERVAL_SHARE:
            break
        rank += 1
    low_s, high_s, middle_s = ordered[rank], ordered[-1 - rank], run.iteration_s.median
    if low_s <= 0 or middle_s <= 0:
        return 0.0, 0.0
    return max(0.0, math.log(middle_s / low_s)), max(0.0, math.log(high_s / middle_s))


def describe_steps(plans: Mapping[str, Plan | None], *, measured: bool) -> list[str]:
    """Phrases that say what a step's seconds stand for; none where they are just that.

    Args:
        plans: by strategy; None: there is none.
        measured: whether any was run, so that there are losses.
    """
    sentences = []
    counts: dict[str, list[str]] = {}
    for name, plan in plans.items():
        if plan is not None and plan.problem.rhythm.is_rounds:
            counts.setdefault(f"{plan.steps_per_iteration:.4g}", []).append(name)
    if counts:
        each = [f"{count} step{'' if count == '1' else 's'}" for count in counts]
        if len(counts) > 1:
            pairs = zip(each, counts.values(), strict=True)
            each = [f"{text} ({', '.join(names)})" for text, names in pairs]
        others = any(plan is not None and not plan.problem.rhythm.is_rounds for plan in plans.values())
        alike = "rounds as other runs have steps" if others else "rounds each"
        losses = f"; losses are after as many {alike}" if measured else ""
        sentences.append(
            f"a round counts as {', '.join(each)}: seconds are for the samples of one step{losses}"
        )
    if uneven_steps(plans.values()) is not None:
        sentences.append(
            "seconds are of a step on average, since staleness helps against stalls now and then"
        )
    return sentences
