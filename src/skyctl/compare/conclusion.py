"""The conclusion of a comparison: which plan to take, how much faster it is, and whether that can be told."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skyctl.compare.number_format import format_ratio, format_ratio_interval, format_seconds
from skyctl.compare.outcome import (
    ALONE,
    BASELINE,
    OPTIMAL,
    PROVED_GAP,
    REFERENCE_ROWS,
    SYNCHRONOUS,
    ComparisonRow,
    StrategyOutcome,
    summarize_outcomes,
)
from skyctl.compare.step_seconds import (
    StepVariation,
    measured_step_s,
    predicted_step_s,
    ratio_errors,
    uneven_steps,
)
from skyctl.planner.prediction_interval import ratio_interval
from skyctl.records.base import Name, Record, Seq

LEAST_REPORTED_GAIN = 0.005
"""Below this part a plan is not called faster where it is not known how sure that is."""
PLAN_NAMES = {"pipeline": "pipeline", "data": "data plan", "hybrid": "hybrid"}
"""The name of a plan, by how it shares the work out."""
MEASUREMENT_NOISE = 0.02
"""Measured steps that differ by less are taken for equal."""


class Gain(Record):
    """How many times as fast a plan is as another: the other's step / its own.

    ``predicted``: by the predicted steps; ``measured``: by the medians (beside a parameter server by the
    means), where both were run; both for as many samples. ``low``, ``high``: in eight cases of ten the ratio
    (the measured one, where there is one) is between them; None: unknown. ``told``: whether the difference
    can be told, so that one may be called faster.
    ``same_plan``: there is none, both are one plan.
    """

    over: Name
    predicted: float
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    told: bool
    same_plan: bool = False

    @property
    def ratio(self) -> float:
        """As measured, else as predicted."""
        return self.predicted if self.measured is None else self.measured

    @property
    def faster(self) -> bool:
        """Whether it may be called faster than the other."""
        return self.told and self.ratio > 1


class Conclusion(Record):
    """The comparison's result. ``best``: the strategy to take; None: none has a plan.

    ``alone_is_best``: one device alone is as fast as the fastest plan, or the difference can't be told.
    ``gains``: of ``best`` over every other strategy that has a plan.
    """

    best: Name | None = None
    alone_is_best: bool = False
    gains: Seq[Gain] = ()

    def over(self, strategy: str) -> Gain | None:
        """How many times as fast the best plan is as that strategy's; None: it has none, or is the best."""
        return next((gain for gain in self.gains if gain.over == strategy), None)


def conclude(outcomes: Sequence[StrategyOutcome]) -> Conclusion:
    """The best strategy and its gains over the others; one device alone where nothing is surely faster."""
    best = _fastest(summarize_outcomes(outcomes))
    if best is None:
        return Conclusion()
    by_name = {outcome.strategy: outcome for outcome in outcomes}
    uneven = uneven_steps(outcome.plan for outcome in outcomes)
    alone = by_name.get(ALONE)
    alone_is_best = False
    if alone is not None and (alone.measurement is not None or not any(o.measurement for o in outcomes)):
        ahead = compare_plans(by_name[best], alone, uneven)
        alone_is_best = ahead is not None and not ahead.faster
    best = ALONE if alone_is_best else best
    gains = [compare_plans(by_name[best], other, uneven) for other in outcomes if other.strategy != best]
    return Conclusion(
        best=best, alone_is_best=alone_is_best, gains=tuple(gain for gain in gains if gain is not None)
    )


def _fastest(compared: Sequence[ComparisonRow]) -> str | None:
    """The strategy with the shortest step, and of those as short a proved one; rows beside come last.

    By the measured step where any was measured, and then within ``MEASUREMENT_NOISE``. None: no plan.
    """
    rows = [row for row in compared if row.predicted_s is not None]
    if any(row.measured for row in rows):
        rows = [row for row in rows if row.measured]
    if not rows:
        return None
    noise = MEASUREMENT_NOISE if rows[0].measured else PROVED_GAP
    limit_s = min(row.shown_s or 0.0 for row in rows) * (1 + noise)
    near = [row for row in rows if (row.shown_s or 0.0) <= limit_s]
    order = {"optimal": 0, "bounded": 1, "feasible": 2}

    def rank(row: ComparisonRow) -> tuple[bool, int, bool, float]:
        is_reference = row.strategy in REFERENCE_ROWS
        return is_reference, order.get(row.status, 3), row.strategy == BASELINE, row.shown_s or 0.0

    return min(near, key=rank).strategy


def compare_plans(
    outcome: StrategyOutcome, other: StrategyOutcome, uneven: StepVariation | None = None
) -> Gain | None:
    """How many times as fast ``outcome`` is as ``other``; None where either has no plan, or takes no time.

    Args:
        uneven: of ``uneven_steps``, of all that is compared; None: of these two.
    """
    if outcome.plan is None or other.plan is None or not outcome.plan.predicted.iteration_s:
        return None
    if uneven is None:
        uneven = uneven_steps((outcome.plan, other.plan))
    predicted = predicted_step_s(other.plan, uneven) / predicted_step_s(outcome.plan, uneven)
    if is_same_plan(outcome, other):
        return Gain(over=other.strategy, predicted=predicted, told=False, same_plan=True)
    measured: float | None = None
    bounds: tuple[float, float] | None = None
    own_s = measured_step_s(outcome.plan, outcome.measurement, uneven)
    others_s = measured_step_s(other.plan, other.measurement, uneven)
    if outcome.measurement is not None and other.measurement is not None and own_s and others_s is not None:
        measured = others_s / own_s
        below, above = ratio_errors(outcome.measurement, other.measurement, of_means=uneven is not None)
        bounds = (
            measured * math.exp(-max(below, MEASUREMENT_NOISE)),
            measured * math.exp(max(above, MEASUREMENT_NOISE)),
        )
    elif uneven is None:
        bounds = ratio_interval(other.plan, outcome.plan)
    low, high = bounds or (None, None)
    ratio = predicted if measured is None else measured
    told = abs(ratio - 1) >= LEAST_REPORTED_GAIN if bounds is None else not bounds[0] <= 1 <= bounds[1]
    return Gain(over=other.strategy, predicted=predicted, measured=measured, low=low, high=high, told=told)


def is_same_plan(outcome: StrategyOutcome, other: StrategyOutcome) -> bool:
    """Whether two plans do the same: one run measures both."""
    if outcome.plan is None or other.plan is None:
        return False
    return (
        outcome.plan.pipelines == other.plan.pipelines
        and outcome.plan.sync == other.plan.sync
        and outcome.plan.problem.schedule == other.plan.problem.schedule
        # one pipeline sums nothing, so no rhythm has a part in it
        and (len(outcome.plan.pipelines) == 1 or outcome.plan.problem.rhythm == other.plan.problem.rhythm)
    )


def rows_named_the_best(conclusion: Conclusion) -> tuple[str, ...]:
    """The rows of which ``describe_conclusion`` says that their plan is the best one's."""
    same = [gain.over for gain in conclusion.gains if gain.same_plan]
    return tuple(
        name for name in same if (name != BASELINE if conclusion.alone_is_best else name == SYNCHRONOUS)
    )


def same_plans(outcomes: Sequence[StrategyOutcome]) -> list[list[StrategyOutcome]]:
    """The outcomes that have a plan, those of one plan together, all in their order."""
    groups: list[list[StrategyOutcome]] = []
    for outcome in outcomes:
        twins = next((twins for twins in groups if is_same_plan(twins[0], outcome)), None)
        if twins is not None:
            twins.append(outcome)
        elif outcome.plan is not None:
            groups.append([outcome])
    return groups


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def describe_conclusion(
    conclusion: Conclusion, compared: Sequence[ComparisonRow], *, capitalized: bool = False
) -> str:
    """``optimal is 1.83× as fast as even, 1.40× as fast as tower alone, measured (predicted 1.9× and 1.5×)``.

    If one device alone is best, that comes first. If there is a plan without the rhythm, the sentence says
    what the best one gains over that, too.

    Args:
        capitalized: begin as a heading does; a strategy's name stays as it is.
    """
    rows = {row.strategy: row for row in compared}
    if conclusion.best is None:
        return f"{'No' if capitalized else 'no'} strategy gives a plan that fits"
    if conclusion.alone_is_best:
        return _describe_alone(conclusion, rows)
    best, base, alone = rows[conclusion.best], rows.get(BASELINE), rows.get(ALONE)
    names = {name: name for name in rows}
    names |= {ALONE: f"{alone.device_label} alone" if alone is not None else ""}
    over_even = conclusion.over(BASELINE)
    # the plan without the rhythm, or where that is the best one, the last strategy's, which has the rhythm
    counterpart = compared[-1] if best.strategy == SYNCHRONOUS else rows.get(SYNCHRONOUS)
    others = dict.fromkeys([BASELINE, ALONE, *([counterpart.strategy] if counterpart is not None else [])])
    searched = rows.get(OPTIMAL)
    if searched is not None and searched.parallel not in (None, best.parallel):
        others[OPTIMAL] = None
        names[OPTIMAL] = f"the best {PLAN_NAMES[searched.parallel]}"
    gains = [gain for gain in map(conclusion.over, others) if gain is not None]
    faster = [gain for gain in gains if gain.faster]
    end = _describe_rhythm(conclusion, counterpart)
    end += "; no device can train alone" if alone is not None and alone.status == "infeasible" else ""
    if base is not None and (best is base or (over_even is not None and not over_even.faster)):
        text = _describe_tie(conclusion, rows, over_even, capitalized=capitalized)
        name = BASELINE if over_even is not None and over_even.same_plan else best.strategy
        more = f"; {name} is {_gain_texts(faster, names)}" if faster else ""
        return text + more + end
    lead = f"{base.strategy} does not fit; " if base is not None and not base.planned else ""
    if not faster:
        return f"{lead}{best.strategy} takes {_step_times(best)}{end}"
    return f"{lead}{best.strategy} is {_gain_texts(faster, names)}{end}"


def _describe_rhythm(conclusion: Conclusion, other: ComparisonRow | None) -> str:
    """The words on the plan that differs in its rhythm, ``other``, where the best one is not faster."""
    if other is None or other.strategy == conclusion.best:
        return ""
    name, gain = other.strategy, conclusion.over(other.strategy)
    if not other.planned:
        return f"; {name} has no plan" if other.status == "undecided" else f"; {name} does not fit"
    if gain is None or gain.faster:
        return ""
    if gain.same_plan:
        return f"; {name} is the same plan as {conclusion.best}"
    if gain.told and gain.ratio > 0:  # it was to be run and was not, or it would be the best
        return f"; {name} is predicted to be {format_ratio(1 / gain.ratio)} as fast"
    return f"; no difference that can be told from {name}"


def _describe_alone(conclusion: Conclusion, rows: dict[str, ComparisonRow]) -> str:
    """``tower alone is best: 1.20× as fast as optimal, 1.83× as fast as even, measured``."""
    best, over_even = rows[ALONE], conclusion.over(BASELINE)
    pipelines = [gain for gain in conclusion.gains if gain.over != BASELINE]
    same = rows_named_the_best(conclusion)
    nearest = min(pipelines, key=lambda gain: gain.ratio, default=None)
    reported, names = [], {name: name for name in (BASELINE, SYNCHRONOUS)}
    parts = []
    if same:
        parts.append(f"{listed(same)} leave{'' if len(same) > 1 else 's'} all other devices unused")
    elif nearest is not None:
        reported.append(nearest)
        names[nearest.over] = listed([gain.over for gain in pipelines if gain.ratio == nearest.ratio])
    apart = [gain for gain in (conclusion.over(SYNCHRONOUS), over_even) if gain is not None]
    ratios = [gain.ratio for gain in reported]  # with its name, where others gain as much
    reported += [
        gain for gain in apart if not gain.same_plan and (gain.over == BASELINE or gain.ratio not in ratios)
    ]
    parts += [
        f"no difference that can be told from {names[gain.over]}" for gain in reported if not gain.faster
    ]
    if faster := [gain for gain in reported if gain.faster]:
        parts.append(_gain_texts(faster, names))
    verdict = "is best" if all(gain.faster for gain in reported) else "is as good as any"
    return f"{best.device_label} alone {verdict}: {'; '.join(parts or [f'it takes {_step_times(best)}'])}"


def _describe_tie(
    conclusion: Conclusion,
    rows: dict[str, ComparisonRow],
    over_even: Gain | None,
    *,
    capitalized: bool,
) -> str:
    """The sentence where nothing is faster than even, or not so that it could be told."""
    base = rows[BASELINE]
    if over_even is not None and over_even.low is not None and over_even.high is not None:
        ratio = f"{format_ratio(over_even.ratio)} ({format_ratio_interval(over_even.low, over_even.high)})"
        how = "predicted" if over_even.measured is None else "measured"
        no = "No" if capitalized else "no"
        return f"{no} difference that can be told between {conclusion.best} and even: {ratio}, {how}"
    others = [row for row in rows.values() if row.strategy not in (BASELINE, ALONE)]
    nothing = "Nothing" if capitalized else "nothing"
    hoped = max(others, key=lambda row: (row.predicted_speedup or 0.0, row.status == "optimal"), default=base)
    if hoped.measured_speedup is not None and (hoped.predicted_speedup or 0.0) >= 1 + LEAST_REPORTED_GAIN:
        return (
            f"{nothing} beat even when it was run: {hoped.strategy} was predicted "
            f"{format_ratio(hoped.predicted_speedup)} as fast, and measured "
            f"{format_ratio(hoped.measured_speedup)}"
        )
    names = [row.strategy for row in others]
    gains = f"; {listed(names)} gain{'' if len(names) > 1 else 's'} nothing" if names else ""
    return f"{nothing} beats even here: {_step_times(base)}{gains}"


def _gain_texts(gains: Sequence[Gain], names: dict[str, str]) -> str:
    """``1.83× as fast as even, 1.40× as fast as tower alone, measured (predicted 1.90× and 1.45×)``.

    ``names``: by strategy, what to call its plan.
    """
    texts = []
    for measured in (True, False):
        kind = [gain for gain in gains if (gain.measured is not None) == measured]
        if not kind:
            continue
        each = [f"{format_ratio(gain.ratio)} as fast as {names[gain.over]}" for gain in kind]
        hoped = " and ".join(format_ratio(gain.predicted) for gain in kind)
        texts.append(", ".join(each) + (f", measured (predicted {hoped})" if measured else ", predicted"))
    return "; ".join(texts)


def _step_times(row: ComparisonRow) -> str:
    text = f"{format_seconds(row.predicted_s)} a step, predicted"
    return text + (f"; {format_seconds(row.measured_s)} measured" if row.measured else "")
