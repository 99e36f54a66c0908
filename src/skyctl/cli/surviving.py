"""What ``launch`` takes and does so that a run survives: checkpoints, restarts, ``--resume``."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import common
from skyctl.cli.common import Output
from skyctl.cli.naming import complete

if TYPE_CHECKING:
    from skyctl.cli.output import Ticker
    from skyctl.files import RunPaths
    from skyctl.records.measurement import Measurement
    from skyctl.records.plan import Plan
    from skyctl.remote.base import ConnectOptions
    from skyctl.supervise.custody.charge import Charge

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
        autocompletion=complete,
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


HoldOption = Annotated[
    float,
    typer.Option(
        "--hold",
        min=60,
        metavar="SECONDS",
        help="How long nodes go on without a supervisor before they end what runs there.",
    ),
]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Leave the run to the background once it trains, and return.")
]
HOLD_S = 43_200.0


def held(connect: ConnectOptions, hold_s: float) -> ConnectOptions:
    """Sessions that outlive their connections and this process, so that nothing they say is lost."""
    return replace(connect, hold_s=hold_s, redial_s=hold_s, manual_ack=True)


def resume_run(
    out: Output,
    run: str,
    cluster: Path | None,
    connect: ConnectOptions,
    *,
    steps: int | None,
    max_restarts: int,
    yes: bool,
    detach: bool,
    output: Path | None,
) -> None:
    """``launch --resume RUN``."""
    from skyctl.control.connect import connected, need_all
    from skyctl.supervise.custody.charge import resumed
    from skyctl.supervise.custody.checkpoints import known_run, refuse_running
    from skyctl.supervise.custody.orders import order_of
    from skyctl.supervise.custody.starting import to_resume
    from skyctl.supervise.custody.supervisors import claim

    known = known_run(run)
    refuse_running(known, "it can be gone on with")
    given = cluster or (Path(known.state.cluster_file) if known.state.cluster_file else None)
    target = common.load_target(given)
    again = to_resume(known, target.cluster, steps, max_restarts)
    nodes = [target.cluster.node(name) for name in again.nodes]
    order = order_of(
        again.request,
        again.options,
        connect,
        digest=str(known.state.order.get("digest") or ""),
        limit=known.state.order.get("limit"),  # type: ignore[arg-type]
        output=output,
    )
    with (
        claim(known.paths, attached=True) as claimed,
        out.progress("launch") as progress,
        connected(nodes, connect, progress, target.everyone) as links,
    ):
        if not links.sessions:
            need_all(links.failures)
        for name, failure in links.failures.items():
            out.warn(f"left out: node {name}: {failure.message}")
        plan = again.plan_for(links.sessions)
        changes = {
            "steps": again.options.steps,
            "order": order,
            "cluster_file": str(target.path.absolute()),
        }
        with resumed(claimed, target.cluster, links.sessions, out.note, **changes) as charge:
            over = watched(out, progress, charge, lambda: plan, yes=yes, detach=detach)
    show_over(out, charge.run_id, over)


def watched(
    out: Output, progress: Ticker, charge: Charge, plan: Callable[[], Plan], *, yes: bool, detach: bool
) -> tuple[Measurement, RunPaths] | None:
    """Supervises a run here, with what a terminal and its keys are for; None where it was detached from.

    Args:
        plan: makes or reads its plan.
    """
    from skyctl.cli.watching import watcher
    from skyctl.supervise.custody.adopting import supervised
    from skyctl.supervise.custody.handing import hand_over
    from skyctl.supervise.custody.leaving import Leaving

    leaving = Leaving(wanted=detach)
    with leaving.on((signal.SIGHUP,)):
        watch = leaving.beside(watcher(out, progress, yes=yes, leaving=True))
        return supervised(charge, plan(), watch, lambda left: hand_over(left, watch.phase))


def show_over(out: Output, run_id: str, over: tuple[Measurement, RunPaths] | None) -> None:
    """What became of a run: its figures, or that it goes on in the background."""
    if over is not None:
        show_run(out, *over)
        return
    out.line(f"run {run_id} goes on in the background")
    out.note(f"see it again: skyctl attach {run_id}\nend it: skyctl stop {run_id}")
    out.json({"run_id": run_id, "detached": True})


def show_run(out: Output, done: Measurement, paths: RunPaths) -> None:
    """What a run that has ended well did."""
    from skyctl.cli.launch import show_measurement
    from skyctl.cli.show_off import show_off

    show_measurement(out, done)
    show_off(out, done)
    if done.trace is not None:
        out.line(f"trace: {done.trace}")
    if done.attempts > 1:
        out.line(f"attempts: {done.attempts}; why each was begun: {paths.state}")
    out.note(f"run: {paths.folder}")
    out.json(done)
