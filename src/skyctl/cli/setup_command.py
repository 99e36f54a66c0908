"""``skyctl setup``: install what nodes lack, and remove it again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.options import ClusterOptions, ConnectionOptions, DryRunOption
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.setup.fleet import NodeOutcome, SetupReport

_STATES = {
    "fine": "left alone",
    "ready": "ready",
    "made": "set up",
    "lacking": "lacking",
    "removed": "removed",
    "nothing": "nothing",
    "failed": "failed",
}


@dataclass(frozen=True, kw_only=True)
class SetupOptions:
    """Options that say where packages come from, and whether they are installed or removed."""

    remove: Annotated[
        bool, typer.Option("--remove", help="Remove what setup has installed, and nothing else.")
    ] = False
    index_url: Annotated[
        str | None,
        typer.Option("--index-url", metavar="URL", help="The package index that is asked, there and here."),
    ] = None
    extra_index_url: Annotated[
        str | None,
        typer.Option(
            "--extra-index-url", metavar="URL", help="One more index; the newest version of all counts."
        ),
    ] = None
    push: Annotated[
        bool,
        typer.Option(
            "--push", help="Fetch wheels here and push them, as is done where a node reaches no index."
        ),
    ] = False
    wheels: Annotated[
        Path | None,
        typer.Option("--wheels", metavar="DIR", help="Push wheels from this folder; no index is asked."),
    ] = None
    dry_run: DryRunOption = False

    def check(self, workload: str | None) -> None:
        """Raises InputError for options that contradict each other."""
        urls = {"--index-url": self.index_url, "--extra-index-url": self.extra_index_url}
        named = [flag for flag, value in urls.items() if value is not None]
        if self.wheels is not None and named:
            raise InputError(f"{named[0]} does not go with --wheels, which asks no index")
        if self.wheels is not None and not self.wheels.is_dir():
            raise InputError(f"--wheels {self.wheels} is no folder")
        if self.remove and (workload is not None or self.wheels is not None or named or self.push):
            what = workload or (named or (["--wheels"] if self.wheels is not None else ["--push"]))[0]
            raise InputError(f"{what} does not go with --remove, which removes all that setup has made")


@command
def setup(
    out: Output,
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="Also what the requirements.txt next to this train.py names, else its pyproject.toml.",
        ),
    ] = None,
    *,
    options: SetupOptions,
    nodes: ClusterOptions,
    connection: ConnectionOptions,
) -> int | None:
    """Install what nodes lack: an environment with this machine's torch version.

    It is kept in the node's ~/.local/share/skyctl/env and used from then on; cluster.yaml stays as it is. A
    node that lacks nothing is left alone. Exit 4 where a node could not be set up: the others are.
    """
    from skyctl.jobs.cluster_setup import find_torch_version, make_launcher_id, set_up_cluster
    from skyctl.setup.installer import SetupJob
    from skyctl.setup.workload_requirements import read_workload_requirements

    options.check(workload)
    target = nodes.load(set_up=False)
    requirements = read_workload_requirements(workload)
    for note in requirements.notes:
        out.note(note)
    job = SetupJob(
        cluster=target.cluster.name,
        torch=find_torch_version(),
        requirements=requirements,
        here=make_launcher_id(),
        index_url=options.index_url,
        extra_index_url=options.extra_index_url,
        push=options.push or options.wheels is not None,
        dry_run=options.dry_run,
    )
    connect = connection.connect_options(target.path)
    with out.progress("setup") as progress:
        report = set_up_cluster(
            target.cluster,
            connect,
            job,
            options.wheels,
            remove=options.remove,
            progress=progress,
            on_node=progress.node,
        )
    _show(out, report, dry_run=options.dry_run, remove=options.remove)
    out.json(report)
    return None if report.ok else 4


def _show(out: Output, report: SetupReport, *, dry_run: bool, remove: bool) -> None:
    rows = [(node.node, _STATES[node.status], _describe_node(node, dry_run, remove)) for node in report.nodes]
    if not out.quiet or not report.ok:
        out.table(("node", "state", "what"), rows)
    for node in report.nodes:
        if node.status == "failed":
            out.warn(f"{node.error}" + (f"\n  next: {node.hint}" if node.hint else ""))
        elif node.note:
            out.note(f"{node.node}: {node.note}")
    has_new = any(node.status == "made" for node in report.nodes)
    if has_new:
        out.note("skyctl uses these from now on (`skyctl check` says so); undo: skyctl setup --remove")


def _describe_node(node: NodeOutcome, dry_run: bool, remove: bool) -> str:
    size = f"{node.size_bytes / 2**20:.0f} MiB" if node.size_bytes is not None else ""
    took = f"{node.took_s:.0f} s" if node.took_s is not None else ""
    if node.status == "failed":
        return "see below"
    if node.status in ("fine", "ready"):
        return f"torch {node.torch} in {node.python}"
    if node.status == "lacking":
        what = f"would remove {node.environment}" if remove else f"would make {node.environment}"
        return what + (f"; {node.python} lacks {', '.join(node.lacks)}" if node.lacks else "")
    if node.status == "made":
        pushed = ", wheels pushed" if node.pushed else ""
        return (
            f"torch {node.torch} in {node.python} ({size}, {took}{pushed}); it lacked {', '.join(node.lacks)}"
        )
    if node.status == "removed":
        return f"{node.environment or 'what was left'} ({size} freed)"
    return "setup has made nothing there" + (" that would go" if dry_run else "")
