"""A comparison as a person sees it: the table, and in one folder plans, plots and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.cli.output import Output
from skyctl.compare.rows import Outcome, Row, rows
from skyctl.errors import SkyctlError
from skyctl.files import comparison_folder, make_private, write_atomic

if TYPE_CHECKING:
    from skyctl.compare.report.facts import Report
    from skyctl.compare.sweeps import Sweep


def show_comparison(out: Output, report: Report, folder: Path | None, *, workload: str) -> Path:
    """Prints the tables; writes plans, plots, ``report.html`` and ``comparison.json`` to ``folder``.

    Args:
        report: what there is to show.
        folder: None: one of its own in the state folder.
        workload: as typed.

    Returns:
        The folder.
    """
    from skyctl.compare.document import document
    from skyctl.compare.report.page import page
    from skyctl.compare.tables import plain, table
    from skyctl.compare.verdict import verdict

    outcomes = list(report.outcomes)
    place = make_private(folder if folder is not None else comparison_folder()).resolve()
    compared = rows(outcomes)
    files = _write_plans(outcomes, place) | _plot(out, report, place)
    files["report"] = str(write_atomic(place / "report.html", page(report), mode=None))
    said = verdict(compared)
    made = document(
        compared, cluster=report.cluster, workload=workload, files=files, sweeps=report.sweeps, verdict=said
    )
    write_atomic(place / "comparison.json", json.dumps(made, indent=2, ensure_ascii=False) + "\n", mode=None)
    out.show(table(compared), plain(compared))
    for text in [*_choice(outcomes), *_shared_runs(compared)]:
        out.line(text)
    for sweep in report.sweeps:
        _show_sweep(out, sweep)
    out.line(said, style="bold")
    for name, path in files.items():
        if path.endswith("trace.json"):
            out.note(f"{name}: {path}")
    out.line(f"report: {files['report']} (plots, plans and comparison.json beside it)")
    out.json(made)
    return place


def _show_sweep(out: Output, sweep: Sweep) -> None:
    from skyctl.compare.sweeps import sentences, table_of

    heads, lines = table_of(sweep)
    out.line()
    out.table(heads, lines)
    for text in sentences(sweep):
        out.line(text, wrap=True)


def _choice(outcomes: list[Outcome]) -> list[str]:
    """Schedule and number of microbatches, which all rows have in common."""
    made = {(o.plan.problem.schedule, o.plan.problem.microbatches) for o in outcomes if o.plan is not None}
    return [f"every row: {schedule}, {microbatches} microbatches" for schedule, microbatches in made][:1]


def _shared_runs(compared: list[Row]) -> list[str]:
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


def _write_plans(outcomes: list[Outcome], place: Path) -> dict[str, str]:
    """One plan file a strategy, ready for ``skyctl launch``; a measurement beside each that ran."""
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


def _plot(out: Output, report: Report, place: Path) -> dict[str, str]:
    """The pictures; without matplotlib a note, as the figures are in the table all the same."""
    files = {}
    try:
        for name, file, draw in _pictures(report):
            draw(place / file)
            files[name] = str(place / file)
    except SkyctlError as exc:
        out.note(str(exc))
    return files


def _pictures(report: Report) -> Sequence[tuple[str, str, Callable[[Path], object]]]:
    """(what it is, its file, what draws it) each."""
    from skyctl.compare import charts
    from skyctl.compare.gantt import plot_steps
    from skyctl.compare.plots import plot_comparison, plot_losses
    from skyctl.control.reporting import plot_links

    compared, outcomes = list(report.rows), list(report.outcomes)
    found: list[tuple[str, str, Callable[[Path], object]]] = [
        ("plot", "comparison.png", lambda path: plot_comparison(compared, path))
    ]
    if report.machines:
        found.append(("cluster", "cluster.png", lambda path: charts.plot_machines(report.machines, path)))
    links = report.links
    if links is not None and len(links.names) > 1:
        found.append(("links", "links.png", lambda path: plot_links(links, path)))
    if any(steps.simulated is not None for steps in report.steps.values()):
        found.append(("steps", "steps.png", lambda path: plot_steps(report.panels(), path)))
    if any(row.bound_s is not None for row in compared):
        found.append(("bound", "bound.png", lambda path: charts.plot_bound(compared, path)))
    if any(outcome.measurement is not None for outcome in outcomes):
        found.append(("prediction", "prediction.png", lambda path: charts.plot_prediction(compared, path)))
        found.append(("losses", "losses.png", lambda path: plot_losses(outcomes, path)))
    for sweep in report.sweeps:
        found.append((f"{sweep.kind} sweep", f"sweep-{sweep.kind}.png", _drawing(sweep)))
    return found


def _drawing(sweep: Sweep) -> Callable[[Path], object]:
    from skyctl.compare import charts

    return lambda path: charts.plot_sweep(sweep, path)
