"""``skyctl probe``: measure devices, links, and a workload's layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import check_output, command
from skyctl.cli.option_values import parse_numbers, require_choice
from skyctl.cli.options import (
    BackendOptions,
    ClusterOptions,
    ClusterTarget,
    ConnectionOptions,
    DefaultedWorkloadOptions,
    DryRunOption,
    OutputOption,
    WorkloadArgument,
)
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.jobs.training_request import TrainingRequest
    from skyctl.probe.link_measurement import LinkSelection
    from skyctl.records.profile import Profile
    from skyctl.remote.base import ConnectOptions
    from skyctl.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ProbeCommandOptions:
    """Options that say what is measured, and what is done with the profile."""

    microbatches: Annotated[
        str | None,
        typer.Option(
            "--microbatches",
            metavar="N[,N…]",
            help="Parts a batch is cut into, one number or several; left out, up to three powers of two that "
            "the model can take.",
        ),
    ] = None
    links: Annotated[
        str | None,
        typer.Option(
            "--links",
            metavar="all|sites|none",
            help="Which links to measure: all pairs of nodes; all of a site, and one between every two "
            "sites; or none. Default: all up to 32 nodes, then sites.",
        ),
    ] = None
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the links as a picture.")
    ] = None
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Check whether the newest profile still holds; exit 5 where not."),
    ] = False
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure everything, also what earlier probes have measured.")
    ] = False
    output: OutputOption = None
    dry_run: DryRunOption = False

    def checked_links(self) -> LinkSelection | None:
        """Which links are measured; None: by their number. Raises InputError for options that contradict."""
        from skyctl.cli.show_profile import LINK_SELECTIONS, check_plot

        check_output(self.output)
        links = None
        if self.links is not None:
            links = cast("LinkSelection", require_choice("--links", self.links, LINK_SELECTIONS))
        if links == "none" and self.plot is not None:
            raise InputError(
                f"--plot {self.plot} does not go with --links none: there would be no links to draw"
            )
        check_plot(self.plot)
        return links


@dataclass(frozen=True, kw_only=True)
class AllProbeOptions(ProbeCommandOptions, BackendOptions):
    """Options that say what is measured, also of the backend that carries tensors."""


@command
def probe(
    out: Output,
    workload: WorkloadArgument = None,
    *,
    nodes: ClusterOptions,
    training: DefaultedWorkloadOptions,
    options: AllProbeOptions,
    connection: ConnectionOptions,
) -> int | None:
    """Measure devices, links and (given a workload) its distinct layers on every device.

    Figures of an earlier probe on the same machines are reused (--refresh measures them again).
    The profile is kept as the cluster's newest; -o adds a copy. Exit 4 where a node could not be measured:
    the others are in the profile nevertheless.
    """
    from skyctl.jobs.node_sessions import connect_nodes
    from skyctl.jobs.profiles import probe_cluster
    from skyctl.planning.backend_choice import measures_gloo, profile_over

    links = options.checked_links()
    target = nodes.load()
    backend = options.requested_backend(target.cluster, encrypt=training.encrypt)
    request = loaded = None

    def load() -> None:
        nonlocal request, loaded
        if workload is not None:
            request, loaded = _request(out, workload, training, options)

    if workload is not None:
        training.parse_request(workload, microbatches=None)  # a mistyped one needs no node to be told
    if options.dry_run or options.quick:
        load()
    if options.dry_run and options.quick:
        _show_check_plan(out, target, request, loaded)
        return None
    if options.dry_run:
        _show_dry_run(out, [node.name for node in target.cluster.nodes], request, loaded, links)
        return None
    connect = connection.connect_options(target.path)
    if options.quick:
        return _check_profile(out, target, connect, request, loaded)
    with (
        out.progress("probe") as progress,
        connect_nodes(target.cluster.nodes, connect, progress, target.everyone, meanwhile=load) as sessions,
    ):
        profile, path = probe_cluster(
            target.cluster,
            sessions,
            request,
            loaded,
            progress,
            progress.node,
            link_selection=links,
            refresh=options.refresh,
            encrypt=training.encrypt,
            gloo=measures_gloo(backend),
            on_note=out.note,
        )
    _show(out, profile, links, options)
    out.note(f"profile: {options.output or path}")
    if backend is not None and backend != "auto":
        profile_over(profile, backend)  # raises where it carries no device's tensors
    if request is not None:
        flags = nodes.format_arguments(request.words(), limited=True)
        out.note(f"next: skyctl plan {flags} -o plan.json", wrap=False)
    out.json(profile)
    return 4 if profile.failures else None


def _request(
    out: Output, workload: str, training: DefaultedWorkloadOptions, options: ProbeCommandOptions
) -> tuple[TrainingRequest, Workload]:
    """The request and the workload to be measured: one number of microbatches, several, or the usual ones."""
    counts = parse_numbers("--microbatches", options.microbatches) if options.microbatches is not None else ()
    request, loaded = training.make_request(
        workload,
        microbatches=counts[0] if len(counts) == 1 else None,
        sweep=counts if len(counts) > 1 else (),
    )
    out.notes(loaded.notes)
    return request, loaded


def _show(out: Output, profile: Profile, links: LinkSelection | None, options: ProbeCommandOptions) -> None:
    """Writes the profile's copy, prints the profile, and warns of what is not known of it."""
    from skyctl.cli.show_profile import (
        describe_failure,
        show_link_notes,
        show_profile,
        show_reused,
        warn_unsteady_times,
    )
    from skyctl.files import write_atomic

    if options.output is not None:
        write_atomic(options.output, profile.to_json(), mode=None)
    show_profile(out, profile)
    show_link_notes(out, profile, links, options.plot)
    warn_unsteady_times(out, profile)
    show_reused(out, profile)
    for failure in profile.failures:
        out.warn(f"{failure.node} was not measured: {describe_failure(failure)}")


def _show_dry_run(
    out: Output,
    nodes: list[str],
    request: TrainingRequest | None,
    loaded: Workload | None,
    how: LinkSelection | None,
) -> None:
    """Says what would be measured (--dry-run)."""
    from skyctl.probe.link_measurement import default_link_selection

    links = how or default_link_selection(len(nodes))
    pairs = {
        "all": "every pair of them",
        "sites": "all pairs within a site and one between every two sites",
        "none": "no links",
    }
    choices: list[int] = []
    source = None
    if request is not None and loaded is not None:
        source = request.spec.source
        choices, left_out = request.choices(loaded)
        out.notes(f"left out: {refused}" for refused in left_out)
    layers = f", {source} at {choices} microbatches" if source is not None else ""
    out.line(f"would measure {', '.join(nodes)}, {pairs[links]}{layers}")
    out.json({"nodes": nodes, "workload": source, "microbatches": choices, "links": links})


def _check_profile(
    out: Output,
    target: ClusterTarget,
    options: ConnectOptions,
    request: TrainingRequest | None,
    loaded: Workload | None,
) -> int | None:
    """Checks whether the newest profile still holds (--quick), and prints a table of differences.

    Returns:
        Exit code 5 where there are differences, 4 where a node could not be checked.
    """
    from skyctl.cli.show_profile import describe_failure
    from skyctl.jobs.node_sessions import connect_nodes
    from skyctl.jobs.profile_recheck import profile_changes, recheck_profile

    then, request, loaded = _newest_profile(target, request, loaded)
    with (
        out.progress("quick probe") as progress,
        connect_nodes(target.cluster.nodes, options, progress, target.everyone) as sessions,
    ):
        now = recheck_profile(target.cluster, sessions, then, request, loaded, progress)
    changes = profile_changes(then, now)
    source = request.spec.source if request is not None else None
    if changes:
        rows = [tuple(asdict(change).values()) for change in changes]
        out.table(("where", "what", "then", "now", "change"), rows)
        out.note(f"next: measure it again: skyctl probe {source or ''}".rstrip(), wrap=False)
    else:
        what = f" of {source}" if source is not None else ""
        where = " where it could be checked" if now.failures else ""
        out.line(f"the profile{what} of {then.created} still holds{where}")
    for failure in now.failures:
        out.warn(f"{failure.node} could not be checked: {describe_failure(failure)}")
    out.json(
        {
            "profile": then.created,
            "holds": not changes,
            "differences": [asdict(change) for change in changes],
            "failures": [failure.model_dump() for failure in now.failures],
        }
    )
    if now.failures:
        return 4
    return 5 if changes else None


def _show_check_plan(
    out: Output, target: ClusterTarget, request: TrainingRequest | None, loaded: Workload | None
) -> None:
    """Says what --quick would check (--dry-run)."""
    then, request, _ = _newest_profile(target, request, loaded)
    nodes = [node.name for node in target.cluster.nodes]
    source = request.spec.source if request is not None else None
    layer = f", the costliest layer of {source} on each device" if source is not None else ""
    ring = ", and a ring of links" if len(nodes) > 1 else ""
    out.line(
        f"would check whether the profile of {then.created} still holds on {', '.join(nodes)}: versions, "
        f"devices, processors, memory{layer}{ring}"
    )
    out.json({"nodes": nodes, "workload": source, "profile": then.created, "links": "ring"})


def _newest_profile(
    target: ClusterTarget, request: TrainingRequest | None, loaded: Workload | None
) -> tuple[Profile, TrainingRequest | None, Workload | None]:
    """The newest profile (of that workload), and what of it is timed."""
    from skyctl.files import newest_profile
    from skyctl.jobs.profile_recheck import most_microbatches, request_of_profile
    from skyctl.jobs.profiles import find_profile

    if request is not None and loaded is not None:
        then, _ = find_profile(target.cluster, None, request, loaded.digest)
        return then, replace(request, microbatches=most_microbatches(then)), loaded
    newest = newest_profile(target.cluster.name)
    if newest is None:
        raise InputError(
            f"cluster {target.cluster.name!r} has no profile yet", hint="measure it: skyctl probe WORKLOAD"
        )
    return newest[1], *request_of_profile(newest[1], target.path.parent)
