"""``skyctl``: the commands, put together. Each lives in a file of its own, whose imports are light."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import Annotated

import typer

from skyctl import __version__
from skyctl.cli import (
    attach,
    bug_report,
    check,
    checkpoint,
    compare,
    demo,
    init,
    join,
    lab,
    launch,
    logs,
    plan,
    probe,
    ps,
    setup,
    stop,
    verify,
)
from skyctl.cli.examples import epilog

app = typer.Typer(
    name="skyctl",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one model over unequal machines: measure each, give each the share that lets all of them "
    "finish together, launch, and prove the gain.",
    epilog="Begin with `skyctl demo`, or with `skyctl init` and `skyctl check`. `skyctl COMMAND --help` has "
    "examples; `skyctl --install-completion` has your shell complete commands, options, nodes and runs.",
)

COMMANDS = {
    "init": init.init,
    "check": check.check,
    "setup": setup.setup,
    "probe": probe.probe,
    "plan": plan.plan,
    "verify": verify.verify,
    "launch": launch.launch,
    "ps": ps.ps,
    "logs": logs.logs,
    "attach": attach.attach,
    "stop": stop.stop,
    "compare": compare.compare,
    "join": join.join,
    "demo": demo.demo,
    "bug-report": bug_report.bug_report,
}
"""In the order of the way: what ``--help`` lists."""


def _version(asked: bool) -> None:
    if asked:
        print(f"skyctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The options before a command."""


for _name, _function in COMMANDS.items():
    app.command(_name, epilog=epilog(_name))(_function)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(lab.app, name="lab")


def main() -> None:
    """The entry point of the ``skyctl`` script. Ends the process with the contract's exit codes."""
    try:
        app()
    except KeyboardInterrupt:  # before or after the command itself
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        with suppress(ValueError):  # not the main thread (a test)
            # What is left is the interpreter's own end, which Ctrl-C would turn into another exit code.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # One that came while a text was being executed (a dataclass in the making) is taken for unhandled by
        # Python, which then dies of it at its end; executing another text makes it forget that.
        exec("")  # noqa: S102
