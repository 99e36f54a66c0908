"""``skyctl logs``: what the ranks of a run print."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.common import Output, command
from skyctl.cli.naming import RunArgument, complete_node
from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.supervise.custody.following import Line
    from skyctl.supervise.custody.runs import Seen

POLL_S = 0.25
ALONE_EVERY_S = 10.0
"""How often it is looked whether the run still has a supervisor."""


@command
def logs(
    out: Output,
    run: RunArgument = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the run has ended, over all its attempts.")
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
        bool, typer.Option("--supervisor", help="What its supervisor said instead.")
    ] = False,
) -> None:
    """Show what the ranks of a run print."""
    from skyctl.supervise.custody.following import Logs, Tail
    from skyctl.supervise.custody.runs import seen

    if follow and out.as_json:
        raise InputError("--follow prints as it goes, --json is one document", hint="leave one of them out")
    if supervisor and (rank is not None or attempt is not None):
        raise InputError("--supervisor has no ranks and no attempts", hint="leave --rank and --attempt out")
    found = seen(run)
    if run is None:
        out.note(f"run {found.paths.run_id}")
    if supervisor:
        tail = Tail(found.paths.supervisor_log, lines)
        first = tail.lines()
        for text in first:
            out.line(text)
        if follow:

            def said() -> None:
                for text in tail.lines():
                    out.line(text)

            _follow(out, found, said)
        out.json({"run_id": found.paths.run_id, "lines": first})
        return
    source = Logs(found.paths, found.state, only=rank, attempt=attempt, last=lines)
    shown = list(source.lines())
    for line in shown:
        out.line(_words(line, prefixed=source.prefixed))
    if not shown and not follow:
        out.note("nothing was printed there (what the supervisor said: --supervisor)")
    if follow:

        def more() -> None:
            from skyctl.supervise.custody.following import state_of

            source.update(state_of(found.paths))
            for line in source.lines():
                out.line(_words(line, prefixed=source.prefixed))

        _follow(out, found, more)
    out.json(
        {
            "run_id": found.paths.run_id,
            "lines": [
                {"attempt": one.attempt, "who": one.who, "node": one.node, "rank": one.rank, "text": one.text}
                for one in shown
            ],
        }
    )


def _words(line: Line, *, prefixed: bool) -> str:
    who = line.who if line.rank is None else str(line.rank)
    return f"[{who} {line.node}] {line.text}" if prefixed else line.text


def _follow(out: Output, found: Seen, more: Callable[[], None]) -> None:
    """Calls ``more`` until the run has ended."""
    from skyctl.records.run import ENDED
    from skyctl.supervise.custody.following import state_of
    from skyctl.supervise.custody.runs import of

    said = ""
    looked_at = float("-inf")
    while True:
        ended = state_of(found.paths).status in ENDED
        more()
        if ended:
            return
        if time.monotonic() - looked_at > ALONE_EVERY_S:
            looked_at = time.monotonic()
            now = of(found.paths.run_id)
            if now.standing == "gone" and not now.ended and said != now.status:
                out.warn(
                    f"run {found.paths.run_id} has no supervisor: what its ranks print stays on the nodes "
                    f"until it has one again (skyctl attach {found.paths.run_id})"
                )
            said = now.status
        time.sleep(POLL_S)
