"""``skyctl demo``: the whole main job on this machine: no root, no SSH, no file needed."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import common, training
from skyctl.cli.common import Output, command

if TYPE_CHECKING:
    from skyctl.records.cluster import Cluster

WORKLOAD = "gpt:layers=6,hidden=128,heads=4,context=64"
SLOWDOWNS = {"laptop": 6.0, "tower": 1.5, "old-box": 3.0}
BATCH_SIZE = 32
MICROBATCHES = 16


@command
def demo(
    out: Output,
    context: typer.Context,
    steps: training.StepsOption = 10,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder for plots and plans."),
    ] = None,
    yes: common.YesOption = False,
) -> None:
    """Probe, plan and run even, heuristic and optimal on three emulated machines of unequal speed.

    They are processes of this machine, slowed down by sleeping: a laptop, a tower four times as fast, an old
    box in between. They train a small GPT, byte by byte, on the Python standard library's own sources.
    """
    from skyctl.cli.again import again
    from skyctl.cli.live import run_all
    from skyctl.cli.show_comparison import show_comparison
    from skyctl.cli.show_plan import show_plan
    from skyctl.cli.show_profile import show_profile
    from skyctl.control.comparing import Comparing
    from skyctl.control.connect import connected, need_all
    from skyctl.control.planning import PlanOptions
    from skyctl.control.reporting import gather
    from skyctl.control.running import RunOptions

    cluster = demo_cluster()
    request, loaded = training.make_request(
        WORKLOAD, batch_size=BATCH_SIZE, microbatches=MICROBATCHES, seed=0, dtype="float32"
    )
    job = Comparing(
        cluster,
        request,
        loaded,
        PlanOptions(microbatches=MICROBATCHES),
        run=RunOptions(steps=steps, weights=False, trace=True),
    )
    out.line(
        "Three machines, emulated here: " + ", ".join(f"{n} (slowed {s:g}×)" for n, s in SLOWDOWNS.items())
    )
    out.line(f"The model: {WORKLOAD}, batch {BATCH_SIZE} in {MICROBATCHES} microbatches")
    with (
        out.progress("demo") as progress,
        connected(cluster.nodes, common.connect_options(None), progress) as links,
    ):
        need_all(links.failures)
        profile = job.profile(links, None, progress, fresh=True)
        out.line("\n1. probe: what each machine can do")
        show_profile(out, profile)
        progress("planning")
        planned = job.plans(profile)
        out.line("\n2. plan: the share that lets all finish together")
        best = planned[-1].plan
        if best is not None:
            show_plan(out, best)
        out.line(f"\n3. compare: {steps} real steps under each plan")
        measured = run_all(out, progress, job, planned, links, yes=yes)
        progress("writing the report")
        way = again(context, request, profile, measured, steps=steps, cluster_file=None)
        report = gather(measured, profile, cluster=cluster, workload=WORKLOAD, again=way)
    folder = show_comparison(out, report, output, workload=WORKLOAD)
    program = "skyctl" if shutil.which("skyctl") else shlex.quote(sys.argv[0])
    out.line(f"Next, on your own machines: {program} init HOST…, then check, probe and compare --measure")
    out.line(f"All of it as one page: open {folder / 'report.html'}", style="bold")


def demo_cluster() -> Cluster:
    """Three local nodes of unequal speed, one thread each."""
    from skyctl.records.cluster import Cluster, Node

    return Cluster(
        name="demo",
        nodes=tuple(
            Node(name=name, transport="local", slowdown=slowdown, threads=1)
            for name, slowdown in SLOWDOWNS.items()
        ),
    )
