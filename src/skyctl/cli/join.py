"""``skyctl join``: nodes for a run that is under way."""

from __future__ import annotations

from typing import Annotated

import typer

from skyctl.cli.checkpoint import RunArgument
from skyctl.cli.common import Output, command
from skyctl.cli.naming import complete_node, did_you_mean
from skyctl.errors import InputError


@command
def join(
    out: Output,
    run: RunArgument,
    nodes: Annotated[
        list[str],
        typer.Argument(
            metavar="NODE…", help="Nodes of the run's cluster file.", autocompletion=complete_node
        ),
    ],
) -> None:
    """Has a run use more nodes: those that came later, or that were lost and are back.

    Its supervisor connects to them, measures what is not known of them, and goes on with them from a
    checkpoint where that is worth a restart.
    """
    from pathlib import Path

    from skyctl.inventory.read import read_cluster
    from skyctl.records.run import ENDED
    from skyctl.supervise.attempts.requests import ask
    from skyctl.supervise.custody.checkpoints import known_run

    known = known_run(run)
    if known.state.status in ENDED:
        raise InputError(
            f"run {known.paths.run_id} has ended ({known.state.status})",
            hint=f"go on with it: skyctl launch --resume {known.paths.run_id}",
        )
    file = known.state.cluster_file
    if file is not None and Path(file).is_file():
        there = [node.name for node in read_cluster(file).nodes]
        for name in nodes:
            if name not in there:
                near = did_you_mean(name, there)
                raise InputError(
                    f"{file} has no node {name!r}; it has {', '.join(there)}{near}", hint="add it there first"
                )
    ask(known.paths, {"op": "join", "nodes": nodes})
    out.line(
        f"asked for {', '.join(nodes)}; what becomes of it: skyctl logs {known.paths.run_id} --supervisor"
    )
    out.json({"run_id": known.paths.run_id, "asked": nodes})
