"""``skyctl``: all commands in one application. Each has a file of its own, whose imports are light."""

from __future__ import annotations

import gc
import signal
import sys
from contextlib import suppress
from typing import Annotated

import typer

from skyctl import __version__
from skyctl.cli import (
    attach_command,
    bench_sync_command,
    bug_report_command,
    check_command,
    checkpoint_command,
    clean_command,
    compare_command,
    config_command,
    demo_command,
    generate_command,
    init_command,
    join_command,
    lab_command,
    launch_command,
    logs_command,
    plan_command,
    probe_command,
    ps_command,
    run_command,
    setup_command,
    stop_command,
    sweep_command,
    verify_command,
    watch_command,
)
from skyctl.cli.examples import format_examples
from skyctl.cli.fresh_launch import find_left_run, go_on_launching
from skyctl.cli.mistyped_words import ScriptCommand, SkyctlCommand, SkyctlGroup

app = typer.Typer(
    name="skyctl",
    cls=SkyctlGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one model over unequal machines: measure each, give each the share that lets all of them "
    "finish together, launch, and prove the gain.",
    epilog="Begin with `skyctl demo`, or with `skyctl init` and `skyctl check`. `skyctl COMMAND --help` has "
    "examples; `skyctl --install-completion` has your shell complete commands, options, nodes and runs.",
)

COMMANDS = {
    "init": init_command.init,
    "check": check_command.check,
    "setup": setup_command.setup,
    "probe": probe_command.probe,
    "plan": plan_command.plan,
    "verify": verify_command.verify,
    "launch": launch_command.launch,
    "run": run_command.run,
    "sweep": sweep_command.sweep,
    "ps": ps_command.ps,
    "logs": logs_command.logs,
    "attach": attach_command.attach,
    "watch": watch_command.watch,
    "stop": stop_command.stop,
    "compare": compare_command.compare,
    "generate": generate_command.generate,
    "bench-sync": bench_sync_command.bench_sync,
    "join": join_command.join,
    "clean": clean_command.clean,
    "config": config_command.config,
    "demo": demo_command.demo,
    "bug-report": bug_report_command.bug_report,
}
"""The commands in the order in which they are used, as ``--help`` lists them."""


def _version(asked: bool) -> None:
    """Prints the version and exits, where ``--version`` was given."""
    if asked:
        print(f"skyctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options that come before a command."""


for _name, _function in COMMANDS.items():
    app.command(
        _name,
        cls=ScriptCommand if _name in ("run", "sweep") else SkyctlCommand,
        epilog=format_examples(_name),
        context_settings={"allow_interspersed_args": _name != "run"},
    )(_function)
app.add_typer(checkpoint_command.app, name="checkpoint")
app.add_typer(lab_command.app, name="lab")


def main() -> None:
    """The entry point of the ``skyctl`` script. Ends the process with the contract's exit codes."""
    try:
        if (left := find_left_run()) is not None:
            sys.exit(go_on_launching(left))
        app()
    except KeyboardInterrupt:  # before or after the command itself
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        gc.freeze()  # with torch the interpreter's last search for garbage takes most of a second
        with suppress(ValueError):  # not the main thread (a test)
            # Only the interpreter's own end is left, which Ctrl-C would turn into another exit code.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # One that came while a text was being executed (a dataclass in the making) is taken for unhandled by
        # Python, which then dies of it at its end; executing another text makes it forget that.
        exec("")  # noqa: S102
