"""``skyctl probe``: measure devices, links, and a workload's layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from skyctl.cli import common, rechecking, training
from skyctl.cli.common import Output, command
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.control.request import Request
    from skyctl.probe.links import How

LinksOption = Annotated[
    str | None,
    typer.Option(
        "--links",
        metavar="all|sites|none",
        help="Which links to measure: all pairs of nodes; all of a site, and one between every two sites; "
        "or none. [default: all up to 32 nodes, then sites]",
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the links as a picture.")
]


@command
def probe(
    out: Output,
    workload: Annotated[str | None, typer.Argument(metavar="[WORKLOAD]", help=training.WORKLOAD_HELP)] = None,
    cluster: common.ClusterOption = None,
    limit: common.LimitOption = None,
    batch_size: training.BatchSizeOption = training.DEFAULT_BATCH_SIZE,
    microbatches: training.SeveralMicrobatchesOption = None,
    dtype: training.DtypeOption = "float32",
    seed: training.SeedOption = 0,
    data: training.DataOption = None,
    random_inputs: training.RandomInputsOption = False,
    encrypt: training.EncryptOption = False,
    links: LinksOption = None,
    plot: PlotOption = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Look whether the newest profile still holds; exit 5 where not."),
    ] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure everything, also what is known from earlier probes.")
    ] = False,
    output: common.OutputOption = None,
    dry_run: common.DryRunOption = False,
    accept_new_host_keys: common.AcceptNewHostKeysOption = False,
    timeout: common.TimeoutOption = common.DEFAULT_TIMEOUT_S,
) -> int | None:
    """Measure devices, links and (given a workload) its distinct layers on every device.

    What an earlier probe measured on the same machines still holds and is not measured again (--refresh).
    The profile is kept as the cluster's newest; -o adds a copy. Exit 4 where a node could not be measured:
    the others are in the profile all the same.
    """
    from skyctl.cli.ranges import numbers
    from skyctl.cli.show_profile import show_profile
    from skyctl.cli.show_sites import check_plot, say_links
    from skyctl.control.connect import connected
    from skyctl.control.probing import probe_cluster
    from skyctl.files import write_atomic

    common.check_output(output)
    how = _links_of(links, plot)
    check_plot(plot)
    if quick:
        _refuse({"--refresh": refresh, "-o": output, "--plot": plot, "--links": links})
    target = common.load_target(cluster, limit)
    request = loaded = None
    if workload is not None:
        several = numbers("--microbatches", microbatches) if microbatches is not None else ()
        request, loaded = training.make_request(
            workload,
            batch_size=batch_size,
            microbatches=several[0] if len(several) == 1 else None,
            seed=seed,
            dtype=dtype,
            data=data,
            random_inputs=random_inputs,
            encrypt=encrypt,
            sweep=several if len(several) > 1 else (),
        )
        training.say_notes(out, loaded)
    if dry_run and quick:
        rechecking.say_what(out, target, request, loaded)
        return None
    if dry_run:
        _say_what(out, [node.name for node in target.cluster.nodes], request, how)
        return None
    options = common.connect_options(
        target.path, accept_new_host_keys=accept_new_host_keys, timeout_s=timeout
    )
    if quick:
        return rechecking.quick(out, target, options, request, loaded)
    with (
        out.progress("probe") as progress,
        connected(target.cluster.nodes, options, progress, target.everyone) as sessions,
    ):
        profile, path = probe_cluster(
            target.cluster,
            sessions,
            request,
            loaded,
            progress,
            progress.node,
            how_links=how,
            refresh=refresh,
            encrypt=encrypt,
        )
    if output is not None:
        write_atomic(output, profile.to_json(), mode=None)
    show_profile(out, profile)
    say_links(out, profile, how, plot)
    training.warn_unsteady(out, profile)
    training.say_taken_over(out, profile)
    for failure in profile.failures:
        hint = f" ({failure.hint})" if failure.hint else ""
        out.warn(f"{failure.node} was not measured: {failure.error}{hint}")
    out.note(f"profile: {output or path}")
    if request is not None:
        flags = training.again(request.words(), cluster, limit)
        out.note(f"next: skyctl plan {flags} -o plan.json")
    out.json(profile)
    return 4 if profile.failures else None


def _links_of(links: str | None, plot: Path | None) -> How | None:
    from skyctl.cli.show_sites import LINKS

    how = None if links is None else cast("How", training.one_of("--links", links, LINKS))
    if how == "none" and plot is not None:
        raise InputError(f"--plot {plot} does not go with --links none: there would be no links to draw")
    return how


def _refuse(given: dict[str, object]) -> None:
    """What does nothing beside --quick."""
    for flag, value in given.items():
        if value:
            raise InputError(f"--quick does not go with {flag}: it makes no profile and measures a few links")


def _say_what(out: Output, nodes: list[str], request: Request | None, how: How | None) -> None:
    """What would be measured."""
    from skyctl.probe.links import default_how

    links = how or default_how(len(nodes))
    pairs = {
        "all": "every pair of them",
        "sites": "all pairs within a site and one between every two sites",
        "none": "no links",
    }
    choices = request.choices() if request is not None else []
    source = request.spec.source if request is not None else None
    layers = f", {source} at {choices} microbatches" if source is not None else ""
    out.line(f"would measure {', '.join(nodes)}, {pairs[links]}{layers}")
    out.json({"nodes": nodes, "workload": source, "microbatches": choices, "links": links})
