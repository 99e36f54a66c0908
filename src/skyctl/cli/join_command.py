"""``skyctl join``: add nodes to a run that is under way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.option_values import complete_node, suggest_similar
from skyctl.cli.options import GivenRunArgument
from skyctl.errors import InputError


@command
def join(
    out: Output,
    run: GivenRunArgument,
    nodes: Annotated[
        list[str],
        typer.Argument(
            metavar="NODE…", help="Nodes of the run's cluster file.", autocompletion=complete_node
        ),
    ],
) -> None:
    """Add nodes to a run: new ones, or ones that were lost and are back.

    Its supervisor connects to them, measures what is not known of them, and restarts the run with them from
    a checkpoint where that is worth it. With `launch --elastic` they enter it while it goes on.
    """
    from skyctl.inventory.cluster_file import read_cluster
    from skyctl.records.run_state import ENDED
    from skyctl.run.operator_requests import JoinRequest, leave_request
    from skyctl.run.restart_policy import resume_hint
    from skyctl.supervision.run_status import load_run

    stored_run = load_run(run)
    if stored_run.state.status in ENDED:
        raise InputError(
            f"run {stored_run.paths.run_id} has ended ({stored_run.state.status})",
            hint=resume_hint(
                stored_run.state, stored_run.plan.problem.rhythm.unit, done=stored_run.state.status == "done"
            ),
        )
    file = stored_run.state.cluster_file
    if file is not None and Path(file).is_file():
        known_nodes = [node.name for node in read_cluster(file).nodes]
        for name in nodes:
            if name not in known_nodes:
                guess = suggest_similar(name, known_nodes)
                raise InputError(
                    f"{file} has no node {name!r}; it has {', '.join(known_nodes)}{guess}",
                    hint="add it there first",
                )
    leave_request(stored_run.paths, JoinRequest(tuple(nodes)))
    out.line(
        f"asked for {', '.join(nodes)}; what becomes of it: "
        f"skyctl logs {stored_run.paths.run_id} --supervisor"
    )
    out.json({"run_id": stored_run.paths.run_id, "asked": nodes})
