"""``skyctl stop``: end runs, and leave nothing of them on their nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from skyctl.cli.common import Output, command
from skyctl.cli.naming import complete


@command
def stop(
    out: Output,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Ids of runs, or their beginnings or ends; default: the one that goes on.",
            autocompletion=complete,
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All runs that go on.")] = False,
    now: Annotated[bool, typer.Option("--now", help="At once, without a last checkpoint.")] = False,
) -> None:
    """End a run after a last checkpoint: nothing of it is left on any node but that.

    A run that has no supervisor any more is ended from here. A run that has ended is left as it is.
    Go on with a stopped run by `skyctl launch --resume RUN`.
    """
    from skyctl.cli.watching import watcher
    from skyctl.supervise.custody import stopping
    from skyctl.supervise.custody.runs import listed, refuse_unfinished, seen

    running = [run for run in listed(every=True)[0] if not run.ended and run.standing != "elsewhere"]
    chosen = stopping.choose(runs or [], seen, running, every=every)
    if not chosen:
        out.note("no run goes on")
    done = []
    for run in chosen:
        refuse_unfinished(run)
        name = run.paths.run_id
        with out.progress(f"stop {name}") as progress:
            one = stopping.stop(run, watcher(out, progress, show_logs=False, yes=True), checkpoint=not now)
        kept = "" if one.step is None else f"; its newest checkpoint is of step {one.step}"
        out.line(f"{name}: {'had ended: ' if one.already else ''}{one.status}{kept}")
        done.append(one)
    out.json(
        {
            "runs": [
                {
                    "run_id": one.run_id,
                    "status": one.status,
                    "already": one.already,
                    "checkpoint": one.step,
                    "unreached": one.unreached,
                }
                for one in done
            ]
        }
    )
    stopping.complain(done)
