"""What ``launch`` takes and does so that a run survives: checkpoints, restarts, ``--resume``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import common
from skyctl.cli.common import Output

if TYPE_CHECKING:
    from skyctl.files import RunPaths
    from skyctl.records.measurement import Measurement
    from skyctl.records.plan import Plan
    from skyctl.remote.base import ConnectOptions

STEPS = 100

StepsOption = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        metavar="N",
        help=f"Training steps; default {STEPS}. With --resume: so many more than its checkpoint has.",
    ),
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Go on with a run that was stopped or has failed, from its newest checkpoint, on the nodes that "
        "answer.",
    ),
]
EveryOption = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        min=0,
        metavar="N",
        help="Steps from one checkpoint to the next; 0: none. Default: as often as costs little, and every 5 "
        "minutes at least.",
    ),
]
KeepOption = Annotated[int, typer.Option("--keep", min=2, metavar="K", help="Checkpoints that are kept.")]
ReplicasOption = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        min=0,
        metavar="R",
        help="Other nodes that keep a copy of each node's checkpoints; default 2.",
    ),
]
KeepHereOption = Annotated[
    bool, typer.Option("--keep-here", help="Copy checkpoints to this machine, too, in the background.")
]
MaxRestartsOption = Annotated[
    int,
    typer.Option(
        "--max-restarts", min=0, metavar="N", help="Attempts after a fault, counted anew after a checkpoint."
    ),
]


def resume_run(
    out: Output,
    run: str,
    cluster: Path | None,
    connect: ConnectOptions,
    *,
    steps: int | None,
    max_restarts: int,
    yes: bool,
    output: Path | None,
) -> None:
    """``launch --resume RUN``."""
    from skyctl.cli.watching import watcher
    from skyctl.control.book import PlainBook
    from skyctl.control.checkpoints import known_run, refuse_running
    from skyctl.control.connect import connected, need_all
    from skyctl.control.starting import to_resume
    from skyctl.control.supervising import Supervisor

    known = known_run(run)
    refuse_running(known, "it can be gone on with")
    given = cluster or (Path(known.state.cluster_file) if known.state.cluster_file else None)
    target = common.load_target(given)
    again = to_resume(known, target.cluster, steps, max_restarts)
    nodes = [target.cluster.node(name) for name in again.nodes]
    with out.progress("launch") as progress, connected(nodes, connect, progress) as links:
        if not links.sessions:
            need_all(links.failures)
        for name, failure in links.failures.items():
            out.warn(f"left out: node {name}: {failure.message}")
        plan = again.plan_for(links.sessions)
        watch = watcher(out, progress, yes=yes)
        state = known.state.model_copy(update={"steps": again.options.steps, "status": "restarting"})
        book = PlainBook(known.paths, state, watch.note)
        done, paths = Supervisor(
            plan,
            target.cluster,
            again.request,
            links.sessions,
            again.options,
            watch,
            book,
            connect=connect,
            resume=True,
        ).run()
    digest = str(state.order.get("digest") or "")
    show_run(out, target.cluster.name, plan, digest, done, paths, output)


def show_run(
    out: Output,
    cluster: str,
    plan: Plan,
    digest: str,
    done: Measurement,
    paths: RunPaths,
    output: Path | None,
) -> None:
    """What a run that has ended well did; keeps what it saw of a plan that was played to the end."""
    from skyctl.cli.launch import show_measurement
    from skyctl.cli.show_off import show_off
    from skyctl.control.learning import keep
    from skyctl.files import write_atomic

    seen = keep(cluster, plan, digest, done) if done.attempts == 1 else None
    if output is not None:
        write_atomic(output, done.to_json(), mode=None)
    show_measurement(out, done)
    show_off(out, done)
    if done.trace is not None:
        out.line(f"trace: {done.trace}")
    if done.attempts > 1:
        out.line(f"attempts: {done.attempts}; why each was begun: {paths.state}")
    out.note(f"run: {paths.folder}")
    if seen is not None:
        out.note(seen)
    out.json(done)
