"""``skyctl stop``: end runs, and clean up their nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.option_values import complete_run


@command
def stop(
    out: Output,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Ids of runs, or their beginnings or ends; default: the one that is under way.",
            autocompletion=complete_run,
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All runs that are under way.")] = False,
    now: Annotated[bool, typer.Option("--now", help="At once, without a last checkpoint.")] = False,
) -> None:
    """End a run after a last checkpoint; nothing else of it stays on any node.

    A run without a supervisor is ended from here. A run that has ended is left as it is.
    Resume a stopped run by `skyctl launch --resume RUN`.
    """
    from skyctl.cli.run_display import make_terminal_callbacks
    from skyctl.supervision import shutdown
    from skyctl.supervision.run_status import list_runs, refuse_other_machine, resolve_run

    running = [
        run for run in list_runs(every=True)[0] if not run.ended and run.supervisor_state != "elsewhere"
    ]
    chosen = shutdown.choose_runs(runs or [], resolve_run, running, every=every)
    if not chosen:
        out.note("no run is under way")
    stopped = []
    for run in chosen:
        refuse_other_machine(run)
        name = run.paths.run_id
        with out.progress(f"stop {name}") as progress:
            result = shutdown.stop_run(
                run, make_terminal_callbacks(out, progress, show_logs=False, yes=True), checkpoint=not now
            )
        kept = "" if result.step is None else f"; its newest checkpoint is of step {result.step}"
        out.line(f"{name}: {'had ended: ' if result.already else ''}{result.status}{kept}")
        stopped.append(result)
    out.json(
        {
            "runs": [
                {
                    "run_id": result.run_id,
                    "status": result.status,
                    "already": result.already,
                    "checkpoint": result.step,
                    "unreached": result.unreached,
                }
                for result in stopped
            ]
        }
    )
    shutdown.refuse_unreached(stopped)
