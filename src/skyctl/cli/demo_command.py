"""``skyctl demo``: probe, plan and compare on this machine; needs no root, no SSH, no file."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.options import ConnectionOptions, DefaultedWorkloadOptions, StepsOption, YesOption

if TYPE_CHECKING:
    from skyctl.jobs.comparison_job import ComparisonJob
    from skyctl.records.cluster import Cluster

WORKLOAD = "gpt:layers=6,hidden=128,heads=4,context=64"
SLOWDOWNS = {"laptop": 6.0, "tower": 1.5, "old-box": 3.0}
BATCH_SIZE = 32
MICROBATCHES = 16


@command
def demo(
    out: Output,
    context: typer.Context,
    steps: StepsOption = 10,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder for plots and plans."),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Compare even, one machine alone, the best pipeline and the best data plan on three emulated machines.

    They are processes of this machine, slowed down by sleeping: a laptop, a tower four times as fast, an old
    box in between. They train a small GPT, byte by byte, on the Python standard library's own sources.
    """
    from skyctl.remote.session_factory import make_connector

    machines = ", ".join(f"{name} (slowed {slowdown:g}×)" for name, slowdown in SLOWDOWNS.items())
    out.line(f"Three machines, emulated here: {machines}")
    out.line(f"The model: {WORKLOAD}, batch {BATCH_SIZE} in {MICROBATCHES} microbatches")
    with ExitStack() as stack:
        progress = stack.enter_context(out.progress("demo"))
        nodes = make_demo_cluster().nodes
        connector = stack.enter_context(make_connector(nodes))
        progress("loading the workload")
        job = make_demo_job()
        from skyctl.cli.run_display import measure_with_progress
        from skyctl.cli.show_comparison import describe_reproduction, show_comparison
        from skyctl.cli.show_plan import show_plan
        from skyctl.cli.show_profile import show_profile
        from skyctl.jobs.node_sessions import connect_nodes, require_all
        from skyctl.jobs.report_builder import build_report
        from skyctl.run.run_options import RunOptions

        connect = ConnectionOptions().connect_options(None)
        sessions = stack.enter_context(connect_nodes(nodes, connect, progress, connector=connector))
        require_all(sessions.failures)
        profile = job.profile(sessions, None, progress, out.note, fresh=True)
        out.line("\n1. probe: what each machine can do")
        show_profile(out, profile)
        progress("planning")
        job = job.with_backend(profile)
        planned = job.plans(profile)
        out.line("\n2. plan: the share that lets all finish together")
        best = planned[-1].plan
        if best is not None:
            show_plan(out, best)
        out.line(f"\n3. compare: {steps} real steps under each plan")
        options = RunOptions(steps=steps, weights=False, trace=True)
        measured = measure_with_progress(
            out, progress, job.cluster, job.request, planned, sessions, options, yes=yes
        )
        progress("writing the report")
        reproduction = describe_reproduction(
            context, job.request, profile, measured, steps=steps, cluster_file=None
        )
        report = build_report(
            measured, profile, cluster=job.cluster, workload=WORKLOAD, reproduction=reproduction
        )
    program = "skyctl" if shutil.which("skyctl") else shlex.quote(sys.argv[0])
    hint = f"next, on your own machines: {program} init HOST…, then check, probe and compare --measure"
    show_comparison(out, report, output, workload=WORKLOAD, hint=hint)


def make_demo_job() -> ComparisonJob:
    """The comparison of the demo: a small GPT on three local nodes, and a row `data` beside its pipelines."""
    from skyctl.jobs.comparison_job import ComparisonJob
    from skyctl.planning.plan_options import PlanOptions
    from skyctl.records.backend import DEFAULT_BACKEND

    request, loaded = DefaultedWorkloadOptions(batch_size=BATCH_SIZE).make_request(
        WORKLOAD, microbatches=MICROBATCHES
    )
    options = PlanOptions(microbatches=MICROBATCHES, backend=DEFAULT_BACKEND)
    return ComparisonJob(make_demo_cluster(), request, loaded, options, other_form=True)


def make_demo_cluster() -> Cluster:
    """Three local nodes of unequal speed, one thread each."""
    from skyctl.records.cluster import Cluster, Node

    return Cluster(
        name="demo",
        nodes=tuple(
            Node(name=name, transport="local", slowdown=slowdown, threads=1)
            for name, slowdown in SLOWDOWNS.items()
        ),
    )
