"""``skyctl watch``: a run's figures as a page in the browser, while it trains."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.attach_command import show_ended
from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command, is_interactive
from skyctl.cli.options import RunArgument

if TYPE_CHECKING:
    from skyctl.supervision.run_page_server import RunPageServer
    from skyctl.supervision.run_status import InspectedRun

POLL_S = 0.5
LAST_LOOK_S = 3.0
"""How long the page is there after its end was sent, for others that are open."""


@command
def watch(
    out: Output,
    run: RunArgument = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="PORT", help="Default: a free one.")
    ] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
) -> int:
    """Show a run in the browser while it trains: loss, seconds a step, devices, attempts, notes.

    The page is on this machine only (127.0.0.1), at an address with a random token; on a terminal it is
    opened. It reads the run's folder and changes nothing: Ctrl-C ends the page, and the run goes on.
    The command ends once the run has ended and the page has shown it, with the exit code of `attach`.
    """
    from skyctl.compare.run_page import render_run
    from skyctl.supervision.run_page_server import RunPageServer
    from skyctl.supervision.run_status import refuse_failed, resolve_run
    from skyctl.supervision.run_watcher import RunWatcher

    observed = resolve_run(run)
    name = observed.paths.run_id
    watcher = RunWatcher(observed)
    server = RunPageServer(lambda: render_run(watcher.figures()), port)
    with server.serving():
        try:
            out.note(f"run {name}; Ctrl-C ends the page, not the run")
            out.line(server.url)
            out.json({"run_id": name, "url": server.url})
            if not no_open and is_interactive():
                _open_browser(server.url)
            ended = _serve(out, server, name)
        except KeyboardInterrupt as exc:
            exc.add_note(f"run {name} is left as it is")
            raise
    if out.as_json:  # the document has told the address
        refuse_failed(ended)
        return 0 if ended.state.status == "done" else 1
    return show_ended(out, ended)


def _serve(out: Output, server: RunPageServer, name: str) -> InspectedRun:
    """Waits until the run has ended and somebody has seen it; the run as it is then."""
    from skyctl.supervision.run_status import inspect_run

    is_notified = False
    while True:
        run = inspect_run(name)
        if run.ended and server.end_served.is_set():
            time.sleep(LAST_LOOK_S)
            return run
        if run.ended and not is_notified:
            is_notified = True
            out.note(f"run {name} has ended: {run.state.status}; the page waits to be looked at")
        server.end_served.wait(POLL_S)


def _open_browser(url: str) -> None:
    """Opens the page in a window. Not where there is no screen: a browser in the terminal would fill it.

    The address is on the browser's command line, which other users of the machine may see for a moment.
    """
    import webbrowser

    if any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        with suppress(webbrowser.Error, OSError):
            webbrowser.open(url)
