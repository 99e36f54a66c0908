"""``skyctl compare --paper``: Sky Computing's experiment, planned and simulated; no cluster is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from skyctl.cli.common import Output
from skyctl.errors import InputError, SkyctlError

if TYPE_CHECKING:
    from skyctl.compare.paper.records import Paper

ALLOWED = ("paper", "output", "time_limit", "as_json", "quiet", "verbose", "yes")
"""Parameters of ``compare`` that go with --paper."""


def compare_paper(out: Output, context: typer.Context, folder: Path | None, time_limit_s: float) -> None:
    """Prints the tables; with ``folder`` writes the picture and ``paper.json`` there.

    ``time_limit_s`` counts where it was given; the default is shorter than other commands'.

    Raises:
        InputError: an option that would do nothing was given.
    """
    _refuse_others(context)
    from skyctl.compare.paper.tables import tables, verdict
    from skyctl.control.paper.experiment import LIMIT_S, experiment
    from skyctl.files import make_private, write_atomic

    with out.progress("paper") as progress:
        limit_s = time_limit_s if _given(context, "time_limit") else LIMIT_S
        paper = experiment(limit_s=limit_s, on_progress=progress)
    for table in tables(paper):
        out.table(table.head, table.rows, title=table.title)
        out.line()
    for text in verdict(paper):
        out.line(text, wrap=True)
    if folder is not None:
        place = make_private(folder)
        files = {"figures": str(place / "paper.json"), **_plot(out, paper, place)}
        paper = paper.model_copy(update={"files": files})
        write_atomic(place / "paper.json", paper.to_json(), mode=None)
        for name, path in files.items():
            out.note(f"{name}: {path}")
    out.note(f"{paper.wall_s:.0f} s; what it means: docs/paper.md")
    out.json(paper)


def _plot(out: Output, paper: Paper, place: Path) -> dict[str, str]:
    """The picture; without matplotlib a note, as the figures are in the tables all the same."""
    from skyctl.compare.paper.plots import plot_paper

    try:
        return {"plot": str(plot_paper(paper, place / "paper.png"))}
    except SkyctlError as exc:
        out.note(str(exc))
        return {}


def _given(context: typer.Context, name: str) -> bool:
    """Whether it stood on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_others(context: typer.Context) -> None:
    """Raises InputError where an option was given that --paper has no use for."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if _given(context, name) and name not in ALLOWED:
            given = parameter.opts[-1] if parameter.opts[-1].startswith("-") else name.upper()
            raise InputError(
                f"--paper simulates a published experiment: {given} has no meaning there",
                hint="skyctl compare --paper, with -o FOLDER for its plot",
            )
