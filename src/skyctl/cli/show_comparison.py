"""A comparison as a person sees it: the table, and the plots beside the plans in one folder."""

from __future__ import annotations

from pathlib import Path

from skyctl.cli.output import Output
from skyctl.compare.rows import Outcome, Row, document, rows
from skyctl.errors import SkyctlError
from skyctl.files import comparison_folder, make_private, write_atomic


def show_comparison(
    out: Output, outcomes: list[Outcome], folder: Path | None, *, cluster: str, workload: str
) -> Path:
    """Prints the table; writes plans, plots and ``comparison.json`` to ``folder``, which is returned.

    ``folder`` None: one of its own in the state folder.
    """
    import json

    from skyctl.compare.tables import plain, table

    place = make_private(folder if folder is not None else comparison_folder())
    compared = rows(outcomes)
    files = _write_plans(outcomes, place) | _plot(out, outcomes, place)
    made = document(compared, cluster=cluster, workload=workload, files=files)
    write_atomic(place / "comparison.json", json.dumps(made, indent=2, ensure_ascii=False) + "\n", mode=None)
    out.show(table(compared), plain(compared))
    for text in [*_choice(outcomes), *_shared_runs(compared)]:
        out.line(text)
    for name, path in files.items():
        if path.endswith((".png", "trace.json")):
            out.note(f"{name}: {path}")
    out.json(made)
    return place


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


def _plot(out: Output, outcomes: list[Outcome], place: Path) -> dict[str, str]:
    """The pictures; without matplotlib a note, as the figures are in the table all the same."""
    from skyctl.compare.plots import plot_comparison, plot_losses

    files = {}
    try:
        picture = place / "comparison.png"
        plot_comparison(rows(outcomes), picture)
        files["plot"] = str(picture)
        if any(outcome.measurement is not None for outcome in outcomes):
            losses = place / "losses.png"
            plot_losses(outcomes, losses)
            files["losses"] = str(losses)
    except SkyctlError as exc:
        out.note(str(exc))
    return files
