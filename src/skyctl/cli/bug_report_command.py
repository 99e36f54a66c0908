"""``skyctl bug-report``: one file for a bug report, with nothing private in it."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import check_output, command
from skyctl.cli.options import ClusterOption, DryRunOption, OutputOption, RunArgument
from skyctl.errors import InputError


@command
def bug_report(
    out: Output,
    run: RunArgument = None,
    cluster: ClusterOption = None,
    no_logs: Annotated[
        bool, typer.Option("--no-logs", help="Leave out logs: they hold what your own code prints.")
    ] = False,
    output: OutputOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Put what a bug report needs into one zip file, without names, addresses, paths and secrets.

    Versions, the cluster file, its newest profile, and the run's state, plan, figures and last lines of its
    logs. Nodes, hosts and users are numbered. Nothing is sent, and no node is asked. Look through it first.
    """
    from skyctl.files import write_atomic
    from skyctl.inventory.cluster_file import cluster_path
    from skyctl.jobs.bug_report_contents import collect_bug_report

    path = output or Path(time.strftime("skyctl-bug-report-%Y%m%d-%H%M%S.zip", time.gmtime()))
    check_output(path)
    cluster_file: Path | None = None
    try:
        cluster_file = cluster_path(cluster)
    except InputError:
        if cluster is not None:
            raise
    report = collect_bug_report(cluster_file, run, logs=not no_logs)
    rows = [(name, len(text.encode())) for name, text in report.files.items()]
    out.table(("file", "bytes"), rows)
    for note in report.notes:
        out.note(f"left out: {note}")
    if not dry_run:
        write_atomic(path, report.zipped())
        shown = shlex.quote(str(path))
        out.line(f"wrote {path}; nothing was sent. Look through it first: unzip -p {shown} | less")
    out.json({"path": None if dry_run else str(path), "files": dict(rows), "left_out": report.notes})
