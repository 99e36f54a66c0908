"""How commands name a run: an id, its beginning or end, or nothing for the newest."""

from __future__ import annotations

from typing import Annotated

import typer


def complete(incomplete: str) -> list[str]:
    """The ids of the runs that begin so, for the shell."""
    from skyctl.files import run_ids

    return [run for run in reversed(run_ids()) if run.startswith(incomplete)]


RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="The run's id, or its beginning or end; default: the newest.",
        autocompletion=complete,
        show_default=False,
    ),
]
