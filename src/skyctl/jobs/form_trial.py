"""Which form of plans is the fastest, where predictions can't tell: each is run for some steps.

Predictions are off by some percent, and differ by form in how: sums, messages and layers have errors of their
own. So forms whose intervals overlap are tried on the cluster, before a run that is much longer. The time
of each step is learnt for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyctl.compare.outcome import StrategyOutcome
from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.planning.parallelism_choice import intricacy
from skyctl.planning.plan_from_profile import plan_profile
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.schedule_choice import NEAR_BEST
from skyctl.records.plan import ParallelismOutcome, Plan, WorkloadRef
from skyctl.records.profile import Profile

TRIAL_STEPS = 11
"""Of each form: ten that are measured, after one that warms up."""
LEAST_PART = 10
"""A run of fewer times as many steps as all forms' trials is not worth them."""
FAR = 2.0
"""Times as long as the fastest: a form that is predicted further from it is not planned again for a trial."""


@dataclass(frozen=True)
class FormTrial:
    """Plans that a prediction can't tell apart, the chosen one first; each with an interval."""

    plans: tuple[Plan, ...]

    @property
    def seconds(self) -> float:
        """About how long all of their steps take."""
        return sum(TRIAL_STEPS * plan.predicted.iteration_s for plan in self.plans)

    def is_worth(self, steps: int) -> bool:
        """Whether a run of so many steps is long enough."""
        return steps >= LEAST_PART * TRIAL_STEPS * len(self.plans)


def make_trial(
    profile: Profile, options: PlanOptions, workload: WorkloadRef, chosen: Plan
) -> FormTrial | None:
    """The forms to be tried beside the chosen plan's; None: there are none.

    Args:
        options: those that the chosen plan was made with, of any form.
    """
    if not chosen.forms or chosen.predicted.interval is None or not chosen.problem.rhythm.is_synchronous:
        return None
    limit_s = FAR * chosen.predicted.iteration_s
    near = [
        form.parallel
        for form in chosen.forms
        if form.parallel != chosen.problem.parallel
        and form.iteration_s is not None
        and form.iteration_s <= limit_s
    ]
    others = []
    for form in near:
        alone = replace(
            options,
            parallel=form,
            beside_pipeline=False,
            backend=chosen.backend,
            time_limit_s=options.time_limit_s / len(near),
        )
        try:
            others.append(plan_profile(profile, alone, workload))
        except (InfeasibleError, UndecidedError):  # it was found when there was more time
            continue
    contending = contenders([chosen, *others])
    return FormTrial(tuple(contending)) if len(contending) > 1 else None


def contenders(plans: Sequence[Plan]) -> list[Plan]:
    """Those of the plans that may be the fastest: no other's interval lies below all of theirs.

    Of plans that put the same layers and shares on the same devices only the first is kept.
    """
    intervals = [(plan, plan.predicted.interval) for plan in plans]
    least_high_s = min((interval.high_s for _, interval in intervals if interval is not None), default=0.0)
    contending: list[Plan] = []
    for plan, interval in intervals:
        may_be_fastest = interval is not None and interval.low_s <= least_high_s
        if may_be_fastest and all(_placed(plan) != _placed(other) for other in contending):
            contending.append(plan)
    return contending


def _placed(plan: Plan) -> object:
    return plan.pipelines, plan.sync, plan.problem.microbatches, plan.problem.schedule


def fastest_tried(outcomes: Sequence[StrategyOutcome]) -> StrategyOutcome | None:
    """The simplest of those within ``NEAR_BEST`` of the shortest measured step; None: none was measured."""
    measured = [
        outcome for outcome in outcomes if outcome.plan is not None and outcome.measurement is not None
    ]
    if not measured:
        return None
    limit_s = min(map(_step_s, measured)) * (1 + NEAR_BEST)
    near = [outcome for outcome in measured if _step_s(outcome) <= limit_s]
    return min(
        near, key=lambda outcome: (0 if outcome.plan is None else intricacy(outcome.plan), _step_s(outcome))
    )


def _step_s(outcome: StrategyOutcome) -> float:
    return outcome.measurement.iteration_s.median if outcome.measurement is not None else 0.0


def with_tried_forms(
    plan: Plan, forms: Sequence[ParallelismOutcome], outcomes: Sequence[StrategyOutcome]
) -> Plan:
    """The plan that a trial chose, which says what each form was predicted and measured to take.

    Args:
        forms: as the plan says that was chosen by prediction.
        outcomes: of the trial, one a form.
    """
    tried = {outcome.plan.problem.parallel: outcome for outcome in outcomes if outcome.plan is not None}

    def with_measured(form: ParallelismOutcome) -> ParallelismOutcome:
        outcome = tried.get(form.parallel)
        if outcome is None or outcome.plan is None:
            return form
        measured_s = _step_s(outcome) if outcome.measurement is not None else None
        update: dict[str, object] = {"measured_s": measured_s}
        update["iteration_s"] = outcome.plan.predicted.iteration_s
        return form.model_copy(update=update)

    return plan.model_copy(update={"forms": tuple(map(with_measured, forms))})
