"""How help lists the options of a command: in panels by kind; rare ones only where ``--help-all`` asks.

``USUAL`` names for each command with many options the few that ``--help`` lists; all others are in the
last panel, *Advanced*. A command that is not in it lists all that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

ADVANCED = "Advanced"
OWN = "Options"
"""Typer's own name for options without a panel: those that only this command has."""
PANELS: Mapping[str, Sequence[str]] = {
    "Training": (
        *("--steps", "--resume", "--init-from", "--learning-rate", "--batch-size", "--seed"),
        *("--dtype", "--lora", "--data", "--ship", "--random-inputs", "--no-compare", "--max-restarts"),
    ),
    "Plan": (
        *("--strategy", "--parallel", "--microbatches", "--pin-first", "--pin-last", "--helper"),
        *("--sync", "--sync-format", "--encrypt", "--backend"),
    ),
    "Nodes": ("--cluster", "--limit", "--local", "--accept-new-host-keys", "--timeout", "--offline"),
    "General": (
        *("--output", "--detach", "--dry-run", "--yes", "--json", "--quiet", "--verbose"),
        *("--help", "--help-all"),
    ),
}
"""By panel the options in it, whatever the command."""
USUAL: Mapping[str, Sequence[str]] = {
    "check": (
        *("--batch-size", "--dtype", "--data", "--ship", "--encrypt", "--cluster", "--limit"),
        *("--accept-new-host-keys", "--timeout", "--json", "--quiet", "--verbose", "--dry-run"),
    ),
    "probe": (
        *("--links", "--quick", "--refresh", "--batch-size", "--dtype", "--microbatches", "--cluster"),
        *("--limit", "--accept-new-host-keys", "--output", "--plot", "--json", "--dry-run"),
    ),
    "plan": (
        *("--problem", "--profile", "--from-run", "--batch-size", "--dtype", "--strategy", "--parallel"),
        *("--microbatches", "--pin-first", "--cluster", "--limit", "--output", "--json"),
    ),
    "launch": (
        *("--steps", "--resume", "--init-from", "--learning-rate", "--batch-size", "--data", "--parallel"),
        *("--cluster", "--limit", "--output", "--json", "--detach", "--yes"),
    ),
    "run": (
        *("--module", "--per-node", "--shares", "--env", "--ship", "--max-restarts", "--cluster", "--limit"),
        *("--output", "--json", "--detach", "--dry-run", "--yes"),
    ),
    "sweep": (
        *("--grid", "--random", "--range", "--from", "--metric", "--mode", "--stop", "--per-device"),
        *("--resume", "--cluster", "--limit", "--json", "--dry-run"),
    ),
    "compare": (
        *("--measure", "--nodes", "--paper", "--steps", "--batch-size", "--data", "--strategy", "--parallel"),
        *("--cluster", "--limit", "--output", "--json", "--yes"),
    ),
    "generate": (
        *("--best", "--max-tokens", "--temperature", "--top-p", "--seed", "--system", "--raw", "--dtype"),
        *("--cluster", "--limit", "--accept-new-host-keys", "--json", "--verbose"),
    ),
    "bench-sync": (
        *("--bytes", "--repeat", "--sync", "--sync-format", "--helper", "--encrypt", "--cluster", "--limit"),
        *("--accept-new-host-keys", "--json", "--quiet", "--verbose", "--yes"),
    ),
}
"""By command the options that ``--help`` lists, beside ``--help`` and ``--help-all``."""
ALL_OPTIONS = "skyctl.all_options"
"""In a context's ``meta``: whether help lists rare options, too."""
_PANEL_OF = {flag: panel for panel, flags in PANELS.items() for flag in flags}
_ORDER = (OWN, *PANELS, ADVANCED)


def _show_all(context: typer.Context, asked: bool) -> None:
    """Prints help with all options and exits, where ``--help-all`` was given."""
    if asked and not context.resilient_parsing:
        context.meta[ALL_OPTIONS] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool,
    typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all options and exit."),
]


def set_panel(command: str | None, option: Any) -> None:
    """Puts an option of a command into its panel. The object is the command's own; a flag shows no type."""
    flags = [flag for flag in option.opts if flag.startswith("--")]
    if option.is_flag and option.metavar is None:
        option.metavar = ""
    usual = USUAL.get(command or "")
    if usual is not None and not {*usual, "--help", "--help-all"}.intersection(flags):
        option.rich_help_panel = ADVANCED
    else:
        option.rich_help_panel = next((_PANEL_OF[flag] for flag in flags if flag in _PANEL_OF), OWN)


def in_panel_order(parameters: Sequence[Any]) -> list[Any]:
    """A command's parameters as help lists them: arguments, then options by panel, *Advanced* last."""
    return sorted(
        parameters, key=lambda parameter: _ORDER.index(getattr(parameter, "rich_help_panel", None) or OWN)
    )


def usual_parameters(parameters: Sequence[Any]) -> list[Any]:
    """Those of them that ``--help`` lists: all but rare ones."""
    return [parameter for parameter in parameters if getattr(parameter, "rich_help_panel", None) != ADVANCED]
