"""What ``compare`` shows and writes: the tables, and in one folder the plans, pictures and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.cli.command_output import Output
from skyctl.compare.outcome import ComparisonRow, StrategyOutcome, summarize_outcomes
from skyctl.errors import SkyctlError
from skyctl.files import comparison_folder, make_private, write_atomic

if TYPE_CHECKING:
    from skyctl.compare.report_data import ComparisonReport
    from skyctl.compare.sweeps import ComparisonSweep


def show_comparison(out: Output, report: ComparisonReport, folder: Path | None, *, workload: str) -> Path:
    """Prints the tables; writes plans, pictures, ``report.html`` and ``comparison.json`` to a folder.

    Args:
        folder: None: a new one in the state folder.
        workload: as typed.

    Returns:
        The folder.
    """
    from skyctl.compare.comparison import Comparison, describe_verdict
    from skyctl.compare.comparison_table import comparison_lines, comparison_table
    from skyctl.compare.report.page import render_report

    outcomes = list(report.outcomes)
    place = make_private(folder if folder is not None else comparison_folder()).resolve()
    compared = summarize_outcomes(outcomes)
    files = _write_plans(outcomes, place) | _plot(out, report, place)
    files["report"] = str(write_atomic(place / "report.html", render_report(report), mode=None))
    verdict = describe_verdict(compared)
    document = Comparison(
        cluster=report.cluster,
        workload=workload,
        rows=tuple(compared),
        files=files,
        sweeps=tuple(report.sweeps),
        verdict=verdict,
    ).model_dump(mode="json")
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_atomic(place / "comparison.json", text, mode=None)
    out.show(comparison_table(compared), comparison_lines(compared))
    for text in [*_choice(outcomes), *_shared_runs(compared)]:
        out.line(text)
    for sweep in report.sweeps:
        _show_sweep(out, sweep)
    out.line(verdict, style="bold")
    for outcome in outcomes:
        if outcome.measurement is not None and outcome.measurement.trace is not None:
            out.note(f"{outcome.strategy} trace: {outcome.measurement.trace}")
    out.line(f"report: {files['report']} (plots, plans and comparison.json beside it)")
    out.json(document)
    return place


def _show_sweep(out: Output, sweep: ComparisonSweep) -> None:
    from skyctl.compare.sweeps import describe_sweep, sweep_table

    heads, lines = sweep_table(sweep)
    out.line()
    out.table(heads, lines)
    for text in describe_sweep(sweep):
        out.line(text, wrap=True)


def _choice(outcomes: list[StrategyOutcome]) -> list[str]:
    """A line with the schedule and the number of microbatches, which all rows have in common."""
    made = {(o.plan.problem.schedule, o.plan.problem.microbatches) for o in outcomes if o.plan is not None}
    return [f"every row: {schedule}, {microbatches} microbatches" for schedule, microbatches in made][:1]


def _shared_runs(compared: list[ComparisonRow]) -> list[str]:
    """Strategies that chose the same plan were run once, and the reader is told so."""
    first: dict[str, str] = {}
    said = []
    for row in compared:
        if row.run_id is None:
            continue
        if row.run_id in first:
            said.append(f"{row.strategy} is the same plan as {first[row.run_id]}: one run measured both")
        first.setdefault(row.run_id, row.strategy)
    return said


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


def _plot(out: Output, report: ComparisonReport, place: Path) -> dict[str, str]:
    """Writes the pictures; without matplotlib there is a note, and the figures are in the table."""
    from skyctl.compare.charts.picture_files import picture_files
    from skyctl.compare.charts.png import write_png

    files = {}
    try:
        for picture in picture_files(report):
            files[picture.name] = str(write_png(place / picture.file, *picture.groups))
    except SkyctlError as exc:
        out.note(str(exc))
    return files
