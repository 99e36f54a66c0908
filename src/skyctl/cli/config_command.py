"""``skyctl config``: which file of defaults is used, and where each option's value comes from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import typer

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import command
from skyctl.cli.command_tree import commands_within
from skyctl.cli.defaults_file import (
    OWN_FILE,
    PROJECT_FILE,
    DefaultsFile,
    file_in_use,
    format_value,
    is_settable,
    long_name,
)
from skyctl.cli.option_values import suggest_similar
from skyctl.cli.options import ClusterOption
from skyctl.errors import InputError


@dataclass(frozen=True)
class OptionSource:
    """An option's value if nobody types it, and where that comes from.

    Attributes:
        command: ``launch``, ``checkpoint ls``.
        option: its long name: ``--steps``.
        value: None: the command chooses.
        source: the file, an environment variable, or skyctl itself.
        place: the table in the file, or the variable; None: neither.
    """

    command: str
    option: str
    value: Any
    source: Literal["file", "environment", "default"]
    place: str | None


def complete_command(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of a command."""
    typed = list(ctx.params.get("words") or ())
    names = (name.split() for name in _commands(ctx))
    nexts = (name[len(typed)] for name in names if name[: len(typed)] == typed and len(name) > len(typed))
    return list(dict.fromkeys(word for word in nexts if word.startswith(incomplete)))


@command
def config(
    out: Output,
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]",
            help="All options of this one; else what the file says of any.",
            autocompletion=complete_command,
            show_default=False,
        ),
    ] = None,
    *,
    cluster: ClusterOption = None,
) -> None:
    """Show which file of defaults is used, and where each option's value comes from.

    The file is skyctl.toml, or [tool.skyctl] of a pyproject.toml, next to the cluster file that -c or
    SKYCTL_CLUSTER names, else in the current folder. Its table [launch] is for that command, [defaults] for
    all: steps = 500 under [launch] is --steps 500 of `skyctl launch`. A typed option counts more.
    """
    del cluster  # it has chosen the file
    defaults = file_in_use(context)
    commands = _commands(context)
    if words:
        name = " ".join(words)
        if name not in commands:
            raise InputError(
                f"there is no command {name!r}{suggest_similar(name, list(commands))}",
                hint="skyctl --help lists them",
            )
        commands = {name: commands[name]}
    rows = [
        row
        for name, command in commands.items()
        for row in _sources(context, name, command, defaults)
        if words or row.source == "file"
    ]
    if defaults is None:
        out.line(f"no file of defaults: neither {OWN_FILE} nor [tool.skyctl] in {PROJECT_FILE}")
    else:
        out.line(f"defaults: {defaults.path}")
    out.table(
        ("command", "option", "value", "from"),
        [
            (
                row.command,
                row.option,
                None if row.value is None else format_value(row.value),
                _format_source(row),
            )
            for row in rows
        ],
        shorten="value",
    )
    out.json(
        {"file": None if defaults is None else str(defaults.path), "values": [asdict(row) for row in rows]}
    )


def _commands(context: typer.Context) -> dict[str, Any]:
    """The commands that have options of their own, as they are typed."""
    application = context.find_root().command
    return {
        name: command for name, command in commands_within(application) if not hasattr(command, "commands")
    }


def _sources(
    context: typer.Context, name: str, command: Any, defaults: DefaultsFile | None
) -> list[OptionSource]:
    """By option of a command where its value comes from; environment over file over default."""
    own_defaults = {} if defaults is None else defaults.commands.get(name, {})
    rows = []
    for option in filter(is_settable, command.params):
        flag = long_name(option)
        if (text := option.resolve_envvar_value(context)) is not None:
            rows.append(OptionSource(name, flag, text, "environment", str(option.envvar)))
        elif (default := own_defaults.get(option.name)) is not None:
            rows.append(OptionSource(name, flag, default.parsed, "file", default.table))
        else:
            rows.append(OptionSource(name, flag, option.default, "default", None))
    return rows


def _format_source(row: OptionSource) -> str:
    return row.source if row.place is None else f"[{row.place}]" if row.source == "file" else row.place
