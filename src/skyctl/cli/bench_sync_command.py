"""``skyctl bench-sync``: what a sum of gradients takes on a cluster, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.option_values import (
    SYNC_FORMATS,
    SYNC_ROUTES,
    complete_choices,
    complete_nodes,
    parse_bytes,
    parse_helpers,
    parse_sync_format,
    parse_sync_list,
)
from skyctl.cli.options import BackendOptions, ClusterOptions, ConnectionOptions, WorkloadOptions, YesOption
from skyctl.compare.number_format import UNKNOWN, format_seconds
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.jobs.sum_benchmark import SumFigures


@dataclass(frozen=True, kw_only=True)
class SumOptions:
    """Options that say what is summed, over which routes, and how often."""

    nbytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Of gradients, as float32: 10MB, 64MiB, 40000000.")
    ] = "10MB"
    sync: Annotated[
        str,
        typer.Option(
            "--sync",
            metavar="ROUTES[,…]",
            autocompletion=complete_choices(*SYNC_ROUTES),
            help="auto, ring, star, server, trees, or several, one after the other.",
        ),
    ] = "auto"
    helper: Annotated[
        list[str] | None,
        typer.Option(
            "--helper",
            metavar="NODE",
            autocompletion=complete_nodes,
            help="This one holds nothing, and only helps to sum. Repeatable.",
        ),
    ] = None
    sync_format: Annotated[
        str | None,
        typer.Option(
            "--sync-format",
            metavar="FORMAT",
            autocompletion=complete_choices(*SYNC_FORMATS),
            help="What gradients are summed as: float32 (default), fixed32, bfloat16 or int8.",
        ),
    ] = None
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, metavar="N", help="Sums of each, after one to warm up.")
    ] = 5
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Probe again, also what earlier probes have measured.")
    ] = False
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Send through TLS; measured and planned so.")] = (
        False
    )
    yes: YesOption = False


@dataclass(frozen=True, kw_only=True)
class BenchSyncOptions(SumOptions, BackendOptions):
    """All options of ``bench-sync`` but those of nodes and connections."""


@command
def bench_sync(
    out: Output, *, nodes: ClusterOptions, connection: ConnectionOptions, options: BenchSyncOptions
) -> int | None:
    """Time of a sum of gradients over a cluster's routes, predicted and measured, without a model.

    All nodes but helpers sum parameters of so many bytes, as a data-parallel run does. Links that no probe
    has measured yet are probed first.
    """
    from skyctl.cli.run_display import measure_with_progress
    from skyctl.cli.show_plan import show_backend
    from skyctl.jobs.comparison_job import ComparisonJob
    from skyctl.jobs.node_sessions import connect_nodes, require_all
    from skyctl.jobs.sum_benchmark import gradients_source, plan_sums, sum_figures
    from skyctl.planning.plan_options import PlanOptions
    from skyctl.run.run_options import RunOptions

    syncs, sync_format = parse_sync_list(options.sync), parse_sync_format(options.sync_format)
    if sync_format is not None and sync_format.startswith("powersgd"):
        raise InputError(f"bench-sync sums vectors, which {sync_format} does not compress")
    nbytes = parse_bytes("--bytes", options.nbytes)
    source = gradients_source(nbytes)
    target = nodes.load()
    helpers = parse_helpers(options.helper, target.cluster)
    names = [node.name for node in target.cluster.nodes if node.name not in (helpers or ())]
    if len(names) < 2:
        raise InputError(
            f"a sum needs two nodes that hold what is summed; there is {names[0] if names else 'none'}",
            hint="see --limit and --helper",
        )
    backend = options.requested_backend(target.cluster, encrypt=options.encrypt, helpers=bool(options.helper))
    with out.progress("bench-sync") as progress:
        progress("loading the workload")
        training = WorkloadOptions(batch_size=len(names), encrypt=options.encrypt)
        request, loaded = training.make_request(source, microbatches=len(names))
        job = ComparisonJob(target.cluster, request, loaded, PlanOptions(backend=backend))
        connect = connection.connect_options(target.path)
        with connect_nodes(target.cluster.nodes, connect, progress, target.everyone) as sessions:
            require_all(sessions.failures)
            profile = job.profile(sessions, None, progress, out.note, fresh=options.refresh)
            progress("planning")
            ref = request.ref(loaded.digest)
            planned = plan_sums(profile, ref, names, syncs, sync_format, helpers, backend)
            show_backend(out, [sums.plan for sums in planned])
            run = RunOptions(steps=options.repeat + 1, weights=False)
            done = measure_with_progress(
                out, progress, job.cluster, job.request, planned, sessions, run, yes=options.yes
            )
    figures = sum_figures(done)
    _show(out, figures)
    rows = [{**asdict(figure), "rate_mbit": figure.rate_mbit} for figure in figures]
    out.json(
        {"bytes": nbytes, "nodes": names, "helpers": helpers or [], "repeat": options.repeat, "rows": rows}
    )
    return 1 if any(figure.error for figure in figures) else None


def _show(out: Output, figures: Sequence[SumFigures]) -> None:
    """A row for each way to sum; below, why one has no figures."""
    rows = [
        (
            figure.sync,
            UNKNOWN
            if figure.kind is None
            else f"{figure.kind} ({figure.routes})"
            if figure.routes > 1
            else figure.kind,
            UNKNOWN if figure.predicted_s is None else format_seconds(figure.predicted_s),
            UNKNOWN if figure.measured_s is None else format_seconds(figure.measured_s),
            UNKNOWN if figure.rate_mbit is None else f"{figure.rate_mbit:.3g}",
            UNKNOWN if figure.bound_mbit is None else f"{figure.bound_mbit:.3g}",
        )
        for figure in figures
    ]
    out.table(("sync", "routes", "predicted", "measured", "Mbit/s", "of at most"), rows)
    for figure in figures:
        if figure.error is not None:
            out.warn(f"{figure.sync}: {figure.error}")
