"""``skyctl ps``: the runs, and the state that each is in."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli.command_output import Output, format_count
from skyctl.cli.command_runner import command

if TYPE_CHECKING:
    from skyctl.supervision.run_status import InspectedRun
    from skyctl.turns.turn_messages import ListedJob, ListedMessage

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

    The nodes of a run whose supervisor is gone are asked about it: its ranks may still train. Take over such
    a run by `skyctl attach RUN`, or end it by `skyctl stop RUN`. Nodes of runs with --turns are asked who
    shares their devices.
    """
    from skyctl.supervision.run_status import list_runs, with_node_processes
    from skyctl.supervision.shared_devices import shared_devices, sharing_runs

    runs, faults = list_runs(every=every)
    if not offline:
        asked = [run for run in runs if not run.ended and run.supervisor_state == "gone"]
        if asked:
            with out.progress("ps", plain=False) as progress:
                progress(f"asking the nodes of {format_count(len(asked), 'run')}")
                runs = with_node_processes(runs)
    shared: list[ListedMessage] = []
    if not offline and (sharing := sharing_runs(runs)):
        with out.progress("ps", plain=False) as progress:
            progress(f"asking who shares the devices of {format_count(len(sharing), 'run')}")
            shared, unknown = shared_devices(sharing)
        faults = [*faults, *unknown]
    if not runs:
        out.line("no run" if every else "no run is under way, none ended in the last day (-a: all)")
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
            [_row(run) for run in runs],
            optional=("checkpoint", "attempts", "cluster", "s/step"),
            shorten="workload",
        )
        for run in runs:
            if run.detail:
                out.line(f"{run.paths.run_id}: {run.detail}", wrap=True)
    for device in shared:
        for job in device.jobs:
            out.line(_share_line(device, job), wrap=True)
    for fault in faults:
        out.warn(fault)
    out.json({"runs": [describe_run(run) for run in runs], "shared": [asdict(device) for device in shared]})


def _share_line(device: ListedMessage, job: ListedJob) -> str:
    """A line that says what a run has had of a device that it shares."""
    from skyctl.compare.number_format import format_span

    now = "has the turn" if job.holds else "asks for none"
    if job.is_late:
        now = "is late: it keeps its turn for longer than is usual"
    elif job.waits_s is not None:
        now = f"waits for {format_span(job.waits_s)}"
    elif job.place:
        now = f"waits for memory, as number {job.place}"
    return (
        f"{device.device} ({device.turns}): {job.job} {now}, {format_count(job.turns, 'turn')}, "
        f"{format_span(job.used_s)} on the device, {format_span(job.waited_s)} waited"
    )


def _row(run: InspectedRun) -> tuple[object, ...]:
    """The cells of a run in the table that ``ps`` prints."""
    state = run.state
    return (
        run.paths.run_id,
        state.workload,
        state.cluster,
        run.status,
        None if state.steps is None else f"{state.step}/{state.steps}",
        None if state.loss is None else f"{state.loss:.4f}",
        None if state.iteration_s is None else f"{state.iteration_s:.3f}",
        len(state.attempts),
        state.checkpoint,
        _age(state.created),
    )


def _age(created: str) -> str:
    """How long ago a run was made; ``30 h ahead`` of this machine's clock where that was set back since."""
    from skyctl.compare.number_format import format_span
    from skyctl.records.clock import CLOCK_STEP_S, age_s

    seconds = age_s(created)
    return f"{format_span(-seconds)} ahead" if seconds < -CLOCK_STEP_S else format_span(max(0.0, seconds))


def describe_run(run: InspectedRun) -> dict[str, Any]:
    """A run as JSON: its state, without what only supervisors need, and what was observed."""
    state = run.state.model_dump(mode="json", exclude={"order", "kind", "version", "sessions"})
    looks = (
        None
        if run.looks is None
        else [
            {"node": look.node, "processes": look.processes, "ranks": look.ranks, "error": look.error}
            for look in run.looks
        ]
    )
    return {
        **state,
        "status": run.status,
        "supervised": run.supervisor_state,
        "detail": run.detail,
        "folder": str(run.paths.folder),
        "nodes": looks,
    }
