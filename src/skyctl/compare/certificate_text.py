"""A plan's certificate as the report says it: what is claimed, and how sure that is."""

from __future__ import annotations

from typing import NamedTuple

from skyctl.compare.number_format import format_percent, format_seconds
from skyctl.compare.outcome import BASELINE, SYNCHRONOUS, ComparisonRow
from skyctl.compare.report_data import ComparisonReport, VerifiedPlan
from skyctl.records.plan import Plan

STRATEGY_TEXTS = {
    "even": "the same number of layers for every device, in the order of the cluster file",
    "alone": "the fastest device that holds the whole model, with the best measured number of microbatches",
    "heuristic": "layers by memory, levelled by speed, then improved by local search",
    "optimal": "an exact search with bounds, which stops when nothing better is left or its time is over",
    "pipeline": "the best pipeline, beside devices that hold all layers each",
    "data": "the best shares of devices that hold all layers each, beside pipelines",
    "hybrid": "the best of several pipelines with cuts of their own, side by side",
    SYNCHRONOUS: "the best plan of that form without the rhythm: all wait for each step's sum",
}
ROUNDS_TEXT = "of the fastest two, three, … devices those whose round is shortest, with level shares"
OWNERS_TEXT = "all owners, each with its machine, or the pipeline of its machines that the strategy finds"
FORMS_TEXT = "the simplest of the best pipeline, data and hybrid plans that is within 1% of the fastest"


class CertificateText(NamedTuple):
    """``facts``: (name, value) each. ``verified``: what ``verify`` found, where it was asked."""

    strategy: str
    status: str
    claim: str
    facts: tuple[tuple[str, str], ...]
    proved: bool
    verified: VerifiedPlan | None


def describe_certificate(report: ComparisonReport, row: ComparisonRow) -> CertificateText:
    """The claim about the plan in that row, and how sure that is."""
    plan = report.plan(row.strategy)
    sure = plan.certificate
    how = FORMS_TEXT if plan.forms else STRATEGY_TEXTS.get(row.strategy, "as assigned")
    if plan.problem.rhythm.is_rounds and row.strategy != BASELINE:
        how = ROUNDS_TEXT
    if plan.problem.owners is not None:
        how = f"{OWNERS_TEXT}{'; averaged after every step' if row.strategy == SYNCHRONOUS else ''}"
    return CertificateText(
        row.strategy,
        _status(row, plan),
        _claim(row, plan),
        (
            ("plan", f"{row.strategy}.plan.json: {how}"),
            ("method", f"{sure.method}, in {format_seconds(sure.wall_s)}"),
        ),
        row.proved,
        report.verified.get(row.strategy),
    )


def _status(row: ComparisonRow, plan: Plan) -> str:
    if plan.certificate.status == "optimal":
        return "proved optimal"
    if plan.certificate.status == "bounded":
        return f"within {format_percent(row.gap, sign=False)} of the best"
    return "claims no bound of its own"


def _claim(row: ComparisonRow, plan: Plan) -> str:
    problem, sure = plan.problem, plan.certificate
    what = (
        f"{_count(len(problem.layers), 'layer')} on {_count(len(problem.devices), 'device')}, "
        f"{_count(problem.microbatches, 'microbatch', 'microbatches')}, schedule {problem.schedule}"
    )
    goal = "a step" if problem.objective == "iteration" else "a microbatch on the slowest stage"
    goal = "a round" if problem.rhythm.is_rounds else goal
    choices = "cut of the layers and no choice or order of the devices"
    if problem.parallel == "data":
        choices = "choice of the devices, of their shares and of the routes to sum over"
        if problem.sync in ("ring", "star"):
            choices = f"choice of the devices, of their shares and of a {problem.sync} to sum over"
    elif problem.parallel == "hybrid":
        choices = "choice of pipelines, of their devices, cuts and shares and of the routes to sum over"
    if sure.status == "optimal":
        return (
            f"For {what}: no {choices} takes less than "
            f"{format_seconds(sure.lower_bound_s)} {goal} by the model of time; this plan takes just that."
        )
    if sure.lower_bound_s is not None:
        return (
            f"For {what}: nothing can take less than {format_seconds(sure.lower_bound_s)} {goal}; this plan "
            f"takes {format_seconds(sure.value_s)}. What lies between was not searched to its end in the "
            "time given."
        )
    if row.bound_s is not None:
        above = f"takes {format_seconds(sure.value_s)}, {format_percent(row.gap, sign=False)} above it"
        where = "is at that bound, so it is as good as any" if row.proved else above
        proved = f"the bound that optimal proved, {format_seconds(row.bound_s)} {goal}, holds for it too"
        return f"For {what}: {proved}; it {where}."
    return f"For {what}: {format_seconds(sure.value_s)} {goal}; nothing is claimed about others."


def _count(count: int, singular: str, several: str | None = None) -> str:
    return f"{count} {singular if count == 1 else several or singular + 's'}"
