"""``skyctl logs``: what the ranks of a run print."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.option_values import complete_node
from skyctl.cli.options import RunArgument
from skyctl.cli.run_display import format_log_line
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.supervision.run_logs import LogFollower, RankLogLine
    from skyctl.supervision.run_status import InspectedRun

POLL_S = 0.25
SUPERVISOR_CHECK_INTERVAL_S = 10.0
"""Time between two checks that the run still has a supervisor."""


@command
def logs(
    out: Output,
    run: RunArgument = None,
    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Keep printing until the run ends, over all its attempts."),
    ] = False,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank",
            metavar="N|NODE",
            help="Only this rank, or the ranks on this node.",
            autocompletion=complete_node,
        ),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, metavar="N", help="This attempt; default: the newest.")
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option("-n", "--lines", min=0, metavar="LINES", help="Only the last lines of each log."),
    ] = None,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="What its supervisor printed instead.")
    ] = False,
) -> None:
    """Show what the ranks of a run print."""
    from skyctl.supervision.run_logs import LogFollower, read_state
    from skyctl.supervision.run_status import resolve_run

    if follow and out.as_json:
        raise InputError("--follow prints as it goes, --json is one document", hint="leave one of them out")
    if supervisor and (rank is not None or attempt is not None):
        raise InputError("--supervisor has no ranks and no attempts", hint="leave --rank and --attempt out")
    observed = resolve_run(run)
    if run is None:
        out.note(f"run {observed.paths.run_id}")
    if supervisor:
        _show_supervisor_log(out, observed, lines, follow=follow)
        return
    source = LogFollower(observed.paths, observed.state, only=rank, attempt=attempt, last=lines)
    shown = _show_rank_logs(out, source)
    if not shown and not follow:
        out.note("nothing was printed there (what the supervisor said: --supervisor)")
    if follow:

        def show_more() -> None:
            source.update(read_state(observed.paths))
            _show_rank_logs(out, source)

        _follow(out, observed, show_more)
    out.json({"run_id": observed.paths.run_id, "lines": [_line_document(line) for line in shown]})


def _show_supervisor_log(out: Output, run: InspectedRun, last: int | None, *, follow: bool) -> None:
    """Prints what the run's supervisor said; with ``follow`` until the run ends."""
    from skyctl.supervision.run_logs import FileTail

    tail = FileTail(run.paths.supervisor_log, last)

    def show_more() -> list[str]:
        lines = tail.lines()
        for text in lines:
            out.line(text)
        return lines

    shown = show_more()
    if follow:
        _follow(out, run, show_more)
    out.json({"run_id": run.paths.run_id, "lines": shown})


def _show_rank_logs(out: Output, source: LogFollower) -> list[RankLogLine]:
    """Prints the lines that are new, and returns them."""
    shown = list(source.lines())
    for line in shown:
        out.line(format_log_line(line) if source.prefixed else line.text)
    return shown


def _line_document(line: RankLogLine) -> dict[str, Any]:
    """A log's line as JSON values."""
    return {
        "attempt": line.attempt,
        "who": line.who,
        "node": line.node,
        "rank": line.rank,
        "text": line.text,
    }


def _follow(out: Output, run: InspectedRun, show_more: Callable[[], object]) -> None:
    """Calls ``show_more`` until the run has ended; warns where it loses its supervisor."""
    from skyctl.records.run_state import ENDED
    from skyctl.supervision.run_logs import read_state
    from skyctl.supervision.run_status import inspect_run

    warned_status = ""
    checked_at = float("-inf")
    while True:
        ended = read_state(run.paths).status in ENDED
        show_more()
        if ended:
            return
        if time.monotonic() - checked_at > SUPERVISOR_CHECK_INTERVAL_S:
            checked_at = time.monotonic()
            now = inspect_run(run.paths.run_id)
            if now.supervisor_state == "gone" and not now.ended and warned_status != now.status:
                out.warn(
                    f"run {run.paths.run_id} has no supervisor: what its ranks print stays on the nodes "
                    f"until it has one again (skyctl attach {run.paths.run_id})"
                )
            warned_status = now.status
        time.sleep(POLL_S)
