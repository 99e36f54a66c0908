"""The output of ``compare``, shown and written: tables, and a folder of plans, pictures and the report.

The report's commands to reproduce it have nothing in them that tells whose machine it was.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import is_given
from skyctl.compare.outcome import (
    ALONE,
    StrategyOutcome,
    pipeline_problem,
    summarize_outcomes,
)
from skyctl.compare.step_seconds import describe_steps
from skyctl.files import comparison_folder, make_private, write_atomic

if TYPE_CHECKING:
    import typer

    from skyctl.compare.conclusion import Conclusion
    from skyctl.compare.report_data import ComparisonReport, Reproduction
    from skyctl.compare.sweeps import ComparisonSweep
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.records.profile import Profile


OMITTED_FLAGS = {"-o", "-y", "-q", "-v", "--json", "--profile", "--timeout", "--accept-new-host-keys"}
"""Options that change no figure, or name a file of this machine."""

PATH_FLAGS = {"-c", "--data"}
"""Options of which only the file's own name is shown."""


def show_comparison(
    out: Output, report: ComparisonReport, folder: Path | None, *, workload: str, hint: str = ""
) -> Path:
    """Prints the tables; writes plans, pictures, ``report.html`` and ``comparison.json`` to a folder.

    The conclusion is the last line.

    Args:
        folder: None: a new one in the state folder.
        workload: as typed.
        hint: a line before the conclusion.

    Returns:
        The folder.
    """
    from skyctl.compare.comparison import Comparison, comparison_lines, comparison_table
    from skyctl.compare.conclusion import describe_conclusion
    from skyctl.compare.form_summary import describe_forms
    from skyctl.compare.report_page import render_report
    from skyctl.compare.sync_summary import sync_table

    outcomes = list(report.outcomes)
    place = make_private(folder if folder is not None else comparison_folder()).resolve()
    compared = summarize_outcomes(outcomes)
    files = _write_plans(outcomes, place) | _plot(report, place)
    files["report"] = str(write_atomic(place / "report.html", render_report(report), mode=None))
    verdict = describe_conclusion(report.conclusion, compared)
    document = Comparison(
        cluster=report.cluster,
        workload=workload,
        rows=tuple(compared),
        files=files,
        sweeps=tuple(report.sweeps),
        verdict=verdict,
        conclusion=report.conclusion,
        syncs=tuple(report.syncs),
    ).model_dump(mode="json")
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_atomic(place / "comparison.json", text, mode=None)
    out.show(comparison_table(compared, report.conclusion.best), comparison_lines(compared))
    for text in [*_choice(outcomes), *_same_plans(outcomes, report.conclusion)]:
        out.line(text)
    for outcome in outcomes:
        if outcome.plan is not None and outcome.plan.forms:
            for text in describe_forms(outcome.plan):
                out.line(text, wrap=True)
    if report.syncs:
        out.line()
        out.table(*sync_table(report.syncs))
    if report.syncs or _has_rhythm(outcomes):
        out.line(_sync_sentence(outcomes), wrap=True)
    for sweep in report.sweeps:
        _show_sweep(out, sweep)
    for outcome in outcomes:
        if outcome.measurement is not None and outcome.measurement.trace is not None:
            out.note(f"{outcome.strategy} trace: {outcome.measurement.trace}")
    out.line(f"report: {files['report']} (plots, plans and comparison.json are next to it)")
    if hint:
        out.line(hint)
    out.line(verdict, style="bold")
    out.json(document)
    return place


def _has_rhythm(outcomes: Sequence[StrategyOutcome]) -> bool:
    """Whether the last outcome's pipelines sum in another rhythm than the synchronous one."""
    plan = outcomes[-1].plan if outcomes else None
    return plan is not None and plan.sync is not None and not plan.problem.rhythm.is_synchronous


def _sync_sentence(outcomes: Sequence[StrategyOutcome]) -> str:
    """How the last plan that sums gradients does so; there must be one."""
    from skyctl.compare.sync_summary import describe_sync

    *_, plan = (o.plan for o in outcomes if o.plan is not None and o.plan.sync is not None)
    return describe_sync(plan)


def _show_sweep(out: Output, sweep: ComparisonSweep) -> None:
    from skyctl.compare.sweeps import describe_sweep, sweep_table

    heads, lines = sweep_table(sweep)
    out.line()
    out.table(heads, lines)
    for text in describe_sweep(sweep):
        out.line(text, wrap=True)


def _choice(outcomes: list[StrategyOutcome]) -> list[str]:
    """A line with the schedule and the number of microbatches of all rows; some may have their own.

    Then what a step's seconds stand for, where that is to be said.
    """
    problem = pipeline_problem(outcomes)
    if problem is None:
        return []
    others = ""
    for outcome in outcomes:
        own = problem if outcome.plan is None else outcome.plan.problem
        differs = own.schedule != problem.schedule and outcome.strategy != ALONE
        if own.microbatches != problem.microbatches or differs:
            schedule = f"{own.schedule}, " if differs else ""
            others += f"; {outcome.strategy}: {schedule}{own.microbatches} microbatches"
    plans = {outcome.strategy: outcome.plan for outcome in outcomes}
    measured = any(outcome.measurement is not None for outcome in outcomes)
    lines = [f"every row: {problem.schedule}, {problem.microbatches} microbatches{others}"]
    return [*lines, *describe_steps(plans, measured=measured)]


def _same_plans(outcomes: Sequence[StrategyOutcome], conclusion: Conclusion) -> list[str]:
    """Which rows have one and the same plan, a sentence a plan; what the verdict says of them is left out.

    Such plans are run once. Their predictions may differ: each form has a model of its own.
    """
    from skyctl.compare.conclusion import listed, rows_named_the_best, same_plans

    named_best = rows_named_the_best(conclusion)
    sentences = []
    for first, *twins in same_plans(outcomes):
        names = [twin.strategy for twin in twins if twin.strategy not in named_best]
        if names:
            verb = "is" if len(names) == 1 else "are"
            run = f": one run measured {'both' if len(names) == 1 else 'all'}" if first.measurement else ""
            sentences.append(f"{listed(names)} {verb} the same plan as {first.strategy}{run}")
    return sentences


def _write_plans(outcomes: list[StrategyOutcome], place: Path) -> dict[str, str]:
    """Writes a plan file for each strategy, ready for ``skyctl launch``, and what was measured of its run.

    Returns:
        By what it is, each file's path; traces are where their runs wrote them.
    """
    files = {}
    for outcome in outcomes:
        if outcome.plan is not None:
            path = write_atomic(place / f"{outcome.strategy}.plan.json", outcome.plan.to_json(), mode=None)
            files[f"{outcome.strategy} plan"] = str(path)
        if outcome.measurement is not None:
            path = write_atomic(
                place / f"{outcome.strategy}.measurement.json", outcome.measurement.to_json(), mode=None
            )
            files[f"{outcome.strategy} measurement"] = str(path)
            if outcome.measurement.trace is not None:
                files[f"{outcome.strategy} trace"] = outcome.measurement.trace
    return files


def _plot(report: ComparisonReport, place: Path) -> dict[str, str]:
    """Writes the pictures."""
    from skyctl.compare.charts.picture_files import picture_files
    from skyctl.compare.charts.svg_file import write_svg

    return {
        picture.name: str(write_svg(place / picture.file, *picture.groups))
        for picture in picture_files(report)
    }


def anonymize_command(context: typer.Context) -> str:
    """The command as it was typed, without what concerns this machine alone."""
    from skyctl.jobs.report_builder import anonymize_workload

    words, arguments = ["skyctl", str(context.info_name)], []
    for parameter in context.command.params:
        name, flag = str(parameter.name), parameter.opts[0]
        value = context.params.get(name)
        if value is None or not is_given(context, name, in_file=True):
            continue
        if parameter.param_type_name == "argument":
            arguments.append(anonymize_workload(str(value)))
        elif flag not in OMITTED_FLAGS and value is not False:
            for item in value if isinstance(value, list | tuple) else [value]:
                text = Path(str(item)).name if flag in PATH_FLAGS else str(item)
                words += [flag] if item is True else [flag, text]
    return shlex.join([*words[:2], *arguments, *words[2:]])


def describe_reproduction(
    context: typer.Context,
    request: TrainingRequest,
    profile: Profile,
    outcomes: Sequence[StrategyOutcome],
    *,
    steps: int | None,
    cluster_file: str | None,
) -> Reproduction:
    """How to reproduce the report's figures: the comparison, its certificate, one of its runs.

    Args:
        steps: those that were trained; None: nothing was run.
        cluster_file: the cluster file's name; None: there is none (the demo's cluster is made up).
    """
    from skyctl.compare.conclusion import conclude
    from skyctl.compare.report_data import Reproduction
    from skyctl.jobs.report_builder import versions

    where = "" if cluster_file is None else f", next to {cluster_file}"
    commands = [(f"The whole comparison{where}:", anonymize_command(context))]
    certified = [
        outcome.strategy
        for outcome in outcomes
        if outcome.plan is not None and outcome.plan.certificate.lower_bound_s is not None
    ]
    if certified:
        verify = f"skyctl verify {certified[-1]}.plan.json"
        commands.append(("The certificate, checked without the solver that made it:", verify))
    best = conclude(outcomes).best
    if best is not None and cluster_file is not None:
        cluster = [] if cluster_file == "cluster.yaml" else ["-c", cluster_file]
        words = ["skyctl", "launch", f"{best}.plan.json", "--steps", str(steps or 10), *cluster]
        commands.append((f"The plan of {best} by itself:", shlex.join(words)))
    spec = request.spec
    facts = [
        *versions(profile),
        ("seed", f"{spec.seed} (of initial weights and data)"),
        ("batch", f"{spec.batch_size} samples a step, {spec.dtype}"),
        *([("adapters", spec.lora_text)] if spec.lora_text is not None else []),
    ]
    if spec.learning_rate is not None:
        facts.append(("learning rate", f"{spec.learning_rate:g}"))
    if cluster_file is not None:
        facts.append(("cluster file", cluster_file))
    return Reproduction(tuple(commands), tuple(facts))
