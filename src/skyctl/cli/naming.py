"""How commands name runs and nodes, and what the shell completes: names that are known on this machine.

Completion asks no node and imports nothing heavy; what can't be read completes to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import typer


def complete(incomplete: str) -> list[str]:
    """The ids of the runs that begin so, for the shell."""
    from skyctl.files import run_ids

    return [run for run in reversed(run_ids()) if run.startswith(incomplete)]


def complete_lab(incomplete: str) -> list[str]:
    """The names of the labs that are up, for the shell."""
    from skyctl.files import home

    labs = home() / "labs"
    names = sorted(entry.name for entry in labs.iterdir()) if labs.is_dir() else []
    return [name for name in names if name.startswith(incomplete)]


def complete_node(ctx: typer.Context, incomplete: str) -> list[str]:
    """The nodes of the cluster file in use that begin so."""
    return [name for name in _names(ctx, groups=False) if name.startswith(incomplete)]


def complete_nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """As ``complete_node`` for a pattern: groups too, and the last of several behind commas."""
    before, comma, last = incomplete.rpartition(",")
    sign = last[:1] if last[:1] in ("!", "&") else ""
    found = [name for name in _names(ctx, groups=True) if name.startswith(last[len(sign) :])]
    return [f"{before}{comma}{sign}{name}" for name in found]


def did_you_mean(word: str, known: Collection[str]) -> str:
    """``; did you mean 'optimal'?``, or nothing where nothing is near."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def choices(*words: str) -> Callable[[str], list[str]]:
    """Completes one of a few words."""

    def given(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return given


def _names(ctx: typer.Context, *, groups: bool) -> list[str]:
    from skyctl.errors import SkyctlError
    from skyctl.inventory.read import cluster_path, read_cluster

    given = ctx.params.get("cluster")
    try:
        cluster = read_cluster(cluster_path(Path(given) if given else None))
    except SkyctlError:
        return []
    return [node.name for node in cluster.nodes] + (sorted(cluster.groups) if groups else [])


RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="The run's id, or its beginning or end; default: the newest.",
        autocompletion=complete,
        show_default=False,
    ),
]
