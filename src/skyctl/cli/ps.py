"""``skyctl ps``: the runs, and what is true of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli.common import Output, command

if TYPE_CHECKING:
    from skyctl.supervise.custody.runs import Seen

OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Ask no node, not even about runs without a supervisor.")
]


@command
def ps(
    out: Output,
    every: Annotated[
        bool, typer.Option("-a", "--all", help="Also runs that ended more than a day ago.")
    ] = False,
    offline: OfflineOption = False,
) -> None:
    """List the runs, newest first.

    A run whose supervisor is gone is looked for on its nodes: its ranks may well go on without one. Go on
    with such a run by `skyctl attach RUN`, or end it by `skyctl stop RUN`.
    """
    from skyctl.supervise.custody.runs import age_s, ago, listed, looked

    runs, faults = listed(every=every)
    if not offline:
        asked = [run for run in runs if not run.ended and run.standing == "gone"]
        if asked:
            with out.progress("ps", plain=False) as progress:
                progress(f"asking the nodes of {len(asked)} run{'s' if len(asked) > 1 else ''}")
                runs = looked(runs)
    if not runs:
        out.line("no run" if every else "no run goes on, none ended in the last day (-a: all)")
    else:
        out.table(
            (
                "run",
                "workload",
                "cluster",
                "status",
                "step",
                "loss",
                "s/step",
                "attempts",
                "checkpoint",
                "age",
            ),
            [_row(run, ago(age_s(run.state.created))) for run in runs],
            spare=("checkpoint", "attempts", "cluster", "s/step"),
            shorten="workload",
        )
        for run in runs:
            if run.detail:
                out.line(f"{run.paths.run_id}: {run.detail}", wrap=True)
    for fault in faults:
        out.warn(fault)
    out.json({"runs": [document(run) for run in runs]})


def _row(run: Seen, age: str) -> tuple[object, ...]:
    state = run.state
    return (
        run.paths.run_id,
        state.workload,
        state.cluster,
        run.status,
        f"{state.step}/{state.steps}",
        None if state.loss is None else f"{state.loss:.4f}",
        None if state.iteration_s is None else f"{state.iteration_s:.3f}",
        len(state.attempts),
        state.checkpoint,
        age,
    )


def document(run: Seen) -> dict[str, Any]:
    """A run as JSON: its state without what only supervisors need, and what was found out."""
    state = run.state.model_dump(mode="json", exclude={"order", "kind", "version", "sessions"})
    looks = (
        None
        if run.looks is None
        else [
            {"node": one.node, "processes": one.processes, "ranks": one.ranks, "error": one.error}
            for one in run.looks
        ]
    )
    return {
        **state,
        "status": run.status,
        "supervised": run.standing,
        "detail": run.detail,
        "folder": str(run.paths.folder),
        "nodes": looks,
    }
