"""``launch`` and ``compare --measure``: the choice between forms that predictions can't tell apart."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.compare.number_format import format_seconds, format_seconds_range

if TYPE_CHECKING:
    from skyctl.cli.progress_display import ProgressDisplay
    from skyctl.compare.outcome import StrategyOutcome
    from skyctl.jobs.form_trial import FormTrial
    from skyctl.jobs.node_sessions import NodeSessions
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.records.cluster import Cluster
    from skyctl.records.plan import Plan
    from skyctl.run.run_options import RunOptions

TrialOption = Annotated[
    bool,
    typer.Option(
        "--trial/--no-trial",
        help="Choose between forms of plans that predictions can't tell apart by ten steps of each.",
    ),
]


def try_forms(
    out: Output,
    progress: ProgressDisplay,
    cluster: Cluster,
    request: TrainingRequest,
    sessions: NodeSessions,
    trial: FormTrial,
    run: RunOptions,
    digest: str,
    *,
    yes: bool,
    wanted: bool,
) -> Plan:
    """The plan whose steps were the shortest of all forms' that were run; their runs are not kept.

    Args:
        run: of the run that is to come; one that is hardly longer than the trial has none.
        digest: of the workload, for what is learnt.
        wanted: whether there is to be a trial; else the plan is the one chosen by prediction.

    Raises:
        RunError: no form ran to the end of its trial.
    """
    from skyctl.cli.run_display import measure_with_progress
    from skyctl.compare.outcome import StrategyOutcome
    from skyctl.errors import RunError
    from skyctl.files import RunPaths
    from skyctl.jobs.form_trial import TRIAL_STEPS, fastest_tried, with_tried_forms
    from skyctl.learning.observations import keep_observations

    chosen, *_ = trial.plans
    out.line(f"{_seen(trial.plans)}: which is the fastest, predictions can't tell", wrap=True)
    if not wanted or not trial.is_worth(run.steps):
        why = "the run is too short for that" if wanted else "--no-trial"
        out.note(f"none of them is tried: {why}")
        return chosen
    out.note(f"ten steps of each are tried, about {format_seconds(trial.seconds)} (--no-trial: none)")
    outcomes = measure_with_progress(
        out,
        progress,
        cluster,
        request,
        [StrategyOutcome(plan.problem.parallel, plan) for plan in trial.plans],
        sessions,
        replace(run, steps=TRIAL_STEPS, weights=False, trace=False),
        yes=yes,
    )
    for outcome in outcomes:
        if outcome.error is not None:
            out.warn(f"{outcome.strategy} did not run to the end of its trial: {outcome.error}")
        elif outcome.plan is not None and outcome.measurement is not None:
            keep_observations(cluster.name, outcome.plan, digest, outcome.measurement)
            shutil.rmtree(RunPaths(outcome.measurement.run_id).folder, ignore_errors=True)
    best = fastest_tried(outcomes)
    if best is None or best.plan is None:
        errors = "; ".join(str(outcome.error) for outcome in outcomes)
        raise RunError(
            f"no form of plans ran to the end of its trial: {errors}",
            hint="--parallel says which form is to be trained, without a trial",
        )
    out.line(describe_trial(outcomes, best), wrap=True)
    return with_tried_forms(best.plan, chosen.forms, outcomes)


def describe_trial(outcomes: Sequence[StrategyOutcome], best: StrategyOutcome) -> str:
    """One line: the median step that each form was measured to take, and which form is trained."""
    parts = [
        f"{outcome.strategy} {format_seconds(outcome.measurement.iteration_s.median)}"
        for outcome in outcomes
        if outcome.measurement is not None
    ]
    return f"measured: {', '.join(parts)} a step; the form is {best.strategy}"


def _seen(plans: Sequence[Plan]) -> str:
    parts = []
    for plan in plans:
        interval = plan.predicted.interval
        range_text = "" if interval is None else f" ({format_seconds_range(interval.low_s, interval.high_s)})"
        parts.append(f"{plan.problem.parallel} {format_seconds(plan.predicted.iteration_s)}{range_text}")
    return ", ".join(parts)
