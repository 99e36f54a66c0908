"""``skyctl setup``: bring nodes what they lack, and take it away again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import common
from skyctl.cli.common import Output, command
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.setup.report import NodeOutcome, SetupReport

IndexUrlOption = Annotated[
    str | None,
    typer.Option("--index-url", metavar="URL", help="The package index that pip asks, there and here."),
]
ExtraIndexUrlOption = Annotated[
    str | None,
    typer.Option("--extra-index-url", metavar="URL", help="One more index; pip takes the newest of all."),
]
PushOption = Annotated[
    bool,
    typer.Option("--push", help="Fetch wheels here and push them, as is done where a node reaches no index."),
]
WheelsOption = Annotated[
    Path | None,
    typer.Option("--wheels", metavar="DIR", help="Push wheels from this folder; no index is asked."),
]
RemoveOption = Annotated[bool, typer.Option("--remove", help="Remove what setup has made, and nothing else.")]

_STATES = {
    "fine": "left alone",
    "ready": "ready",
    "made": "set up",
    "lacking": "lacking",
    "removed": "removed",
    "nothing": "nothing",
    "failed": "failed",
}


@command
def setup(
    out: Output,
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]", help="Also what the requirements.txt beside this train.py names."
        ),
    ] = None,
    remove: RemoveOption = False,
    index_url: IndexUrlOption = None,
    extra_index_url: ExtraIndexUrlOption = None,
    push: PushOption = False,
    wheels: WheelsOption = None,
    cluster: common.ClusterOption = None,
    limit: common.LimitOption = None,
    dry_run: common.DryRunOption = False,
    accept_new_host_keys: common.AcceptNewHostKeysOption = False,
    timeout: common.TimeoutOption = common.DEFAULT_TIMEOUT_S,
) -> int | None:
    """Bring nodes what they lack: an environment with this machine's torch version.

    It lies in the node's ~/.local/share/skyctl/env and is used from then on; cluster.yaml stays as it is. A
    node that lacks nothing is left alone. Exit 4 where a node could not be set up: the others are.
    """
    from skyctl.control.setting_up import launcher, set_up, torch_here
    from skyctl.setup.mending import Job
    from skyctl.setup.requirements import requirements_of

    _check(
        workload,
        remove,
        wheels,
        given={"--index-url": index_url, "--extra-index-url": extra_index_url},
        push=push,
    )
    target = common.load_target(cluster, limit, set_up=False)
    job = Job(
        cluster=target.cluster.name,
        torch=torch_here(),
        requirements=requirements_of(workload),
        here=launcher(),
        index_url=index_url,
        extra_index_url=extra_index_url,
        push=push or wheels is not None,
        dry_run=dry_run,
    )
    options = common.connect_options(
        target.path, accept_new_host_keys=accept_new_host_keys, timeout_s=timeout
    )
    with out.progress("setup") as progress:
        report = set_up(
            target.cluster, options, job, wheels, remove=remove, progress=progress, on_node=progress.node
        )
    _show(out, report, dry_run=dry_run, remove=remove)
    out.json(report)
    return None if report.ok else 4


def _check(
    workload: str | None, remove: bool, wheels: Path | None, *, given: dict[str, str | None], push: bool
) -> None:
    """Raises InputError for options that contradict each other."""
    named = [flag for flag, value in given.items() if value is not None]
    if wheels is not None and named:
        raise InputError(f"{named[0]} does not go with --wheels, which asks no index")
    if wheels is not None and not wheels.is_dir():
        raise InputError(f"--wheels {wheels} is no folder")
    if remove and (workload is not None or wheels is not None or named or push):
        what = workload or (named or (["--wheels"] if wheels is not None else ["--push"]))[0]
        raise InputError(f"{what} does not go with --remove, which removes all that setup has made")


def _show(out: Output, report: SetupReport, *, dry_run: bool, remove: bool) -> None:
    rows = [(node.node, _STATES[node.status], _what(node, dry_run, remove)) for node in report.nodes]
    if not out.quiet or not report.ok:
        out.table(("node", "state", "what"), rows)
    for node in report.nodes:
        if node.status == "failed":
            out.warn(f"{node.error}" + (f"\n  next: {node.hint}" if node.hint else ""))
        elif node.note:
            out.note(f"{node.node}: {node.note}")
    made = any(node.status == "made" for node in report.nodes)
    if made:
        out.note("skyctl uses these from now on (`skyctl check` says so); undo: skyctl setup --remove")


def _what(node: NodeOutcome, dry_run: bool, remove: bool) -> str:
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
