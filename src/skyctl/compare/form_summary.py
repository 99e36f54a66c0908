"""The result of each form of plans, as a person reads it: a table, why some have no plan, and the choice."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.compare.number_format import UNKNOWN, format_percent, format_ratio, format_seconds
from skyctl.compare.outcome import PROVED_GAP
from skyctl.records.plan import ParallelismOutcome, Plan

LEAST_SHOWN = 0.0005
"""A gap below this would be written as none."""
HARDLY = 1.005
"""Times as fast; what is less would be written as 1.00."""
FORM_NAMES = {"pipeline": "a pipeline", "data": "data parallelism", "hybrid": "several pipelines"}


def form_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """(headings, cells) of the forms that were looked at; ``*`` marks the plan's own."""
    fastest_s = min((form.iteration_s for form in plan.forms if form.iteration_s is not None), default=0.0)
    tried = any(form.measured_s is not None for form in plan.forms)
    rows = [
        [
            form.parallel + ("*" if form.parallel == plan.problem.parallel else ""),
            format_seconds(form.iteration_s),
            _times_as_long(form, fastest_s),
            *([format_seconds(form.measured_s)] if tried else []),
            format_seconds(form.lower_bound_s),
        ]
        for form in plan.forms
    ]
    measured = ["measured"] if tried else []
    return ["form", "step, predicted", "times as long", *measured, "none is faster than"], rows


def _times_as_long(form: ParallelismOutcome, fastest_s: float) -> str:
    return (
        UNKNOWN if form.iteration_s is None or fastest_s <= 0 else format_ratio(form.iteration_s / fastest_s)
    )


def describe_forms(plan: Plan) -> list[str]:
    """In words: why forms have no plan, which was chosen and why, and the bound that holds for all of them.

    Nothing where one form alone was looked at.
    """
    if not plan.forms:
        return []
    words = []
    for form in plan.forms:
        if form.iteration_s is None:
            fits = "" if form.fits else "does not fit: "
            words.append(f"{FORM_NAMES[form.parallel]}: {fits}{form.reason or 'no plan was found'}")
    bound = least_bound_s(plan.forms)
    return [*words, _choice(plan), *([] if bound is None else [_bound(plan, bound)])]


def _choice(plan: Plan) -> str:
    """Which form the plan has, and how far the others are from it."""
    alone = len(plan.placed_stages) == 1
    name = "one device alone" if alone else FORM_NAMES[plan.problem.parallel]
    step_s = plan.predicted.iteration_s
    if any(form.measured_s is not None for form in plan.forms):
        return f"form: {name}, by ten measured steps of each that predictions could not tell apart"
    others = [
        (form.iteration_s, form.parallel)
        for form in plan.forms
        if form.iteration_s is not None and form.parallel != plan.problem.parallel
    ]
    if not others:
        return f"form: {name}; no other form has a plan with these options"
    next_s, nearest = min(others)
    if next_s < step_s * (1 - PROVED_GAP):
        return (
            f"form: {name}, the simplest that is hardly slower than the fastest "
            f"({nearest}: {format_seconds(next_s)} a step)"
        )
    if next_s <= step_s * (1 + PROVED_GAP) or step_s <= 0:
        return f"form: {name}, the simplest of those as fast"
    if next_s / step_s < HARDLY:
        return f"form: {name}, hardly faster than the next best ({nearest})"
    return f"form: {name}, {format_ratio(next_s / step_s)} as fast as the next best ({nearest})"


def _bound(plan: Plan, bound_s: float) -> str:
    gap = plan.predicted.iteration_s / bound_s - 1
    if gap <= PROVED_GAP:
        return "no plan of any form is faster, with these schedules and microbatches (proved)"
    above = "less than 0.1%" if gap < LEAST_SHOWN else format_percent(gap, sign=False)
    return (
        f"no plan of any form can be faster than {format_seconds(bound_s)}, with these schedules and "
        f"microbatches; this one takes {above} longer"
    )


def least_bound_s(forms: Sequence[ParallelismOutcome]) -> float | None:
    """No plan of these forms takes less; None where one that may fit claims no bound, or none is there."""
    bounds = [form.lower_bound_s for form in forms if form.fits]
    if any(bound is None or bound <= 0 for bound in bounds):
        return None
    return min((bound for bound in bounds if bound is not None), default=None)
