"""Writes docs/reference/: a page of every command, made from the commands themselves.

python scripts/make_reference.py
"""

from __future__ import annotations

import inspect
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from skyctl.cli.app import app
from skyctl.cli.command_tree import commands_within
from skyctl.cli.examples import EXAMPLES
from skyctl.cli.help_panels import OWN, in_panel_order

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "<!-- Made by scripts/make_reference.py, which `make docs` runs: edit the command itself. -->"


def reference_pages() -> dict[str, str]:
    """Every page of the reference by its file's name."""
    application: Any = typer.main.get_command(app)
    root = application.make_context("skyctl", [], resilient_parsing=True)
    commands = {
        name: command for name, command in commands_within(application) if not hasattr(command, "commands")
    }
    pages = {page_name(name): _page(name, command, root) for name, command in commands.items()}
    return {"index.md": _index(commands), **pages}


def page_name(command: str) -> str:
    """``checkpoint ls`` → ``checkpoint-ls.md``."""
    return f"{command.replace(' ', '-')}.md"


def _index(commands: dict[str, Any]) -> str:
    rows = [
        f"| [`skyctl {name}`]({page_name(name)}) | {_cell(_summary(command))} |"
        for name, command in commands.items()
    ]
    return "\n".join(
        [
            NOTE,
            "",
            "# Commands",
            "",
            "`skyctl COMMAND --help` lists a command's usual options, `--help-all` all of them.",
            "",
            "| command | does |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _page(name: str, command: Any, root: Any) -> str:
    parent = root
    *groups, own = name.split()
    inner = root.command
    for group in groups:
        inner = inner.commands[group]
        parent = inner.make_context(group, [], parent=parent, resilient_parsing=True)
    context = command.make_context(own, [], parent=parent, resilient_parsing=True)
    usage = " ".join([f"skyctl {name}", *command.collect_usage_pieces(context)])
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    parts = [NOTE, f"# skyctl {name}", *map(_prose, paragraphs), f"```text\n{usage}\n```"]
    parts += ["## Examples", "```console\n{}\n```".format("\n".join(f"$ {one}" for one in EXAMPLES[name]))]
    parameters = command.get_params(context)
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = in_panel_order([one for one in parameters if one.param_type_name == "option"])
    if arguments:
        rows = [f"| `{_cell(one.metavar or one.name)}` | {_cell(one.help or '')} |" for one in arguments]
        parts += ["## Arguments", "\n".join(["| argument | meaning |", "|---|---|", *rows])]
    for panel, members in groupby(options, lambda one: one.rich_help_panel or OWN):
        rows = [_row(one) for one in members]
        parts += [f"## {panel}", "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def _row(option: Any) -> str:
    short_first = sorted(option.opts, key=len)  # those of help are in no order
    names = ", ".join([*short_first, *option.secondary_opts])
    typed = f"{names} {option.metavar}" if option.metavar else names
    meaning = _prose(option.help or "")
    if option.envvar is not None:
        meaning += f" Environment: `{option.envvar}`."
    return f"| `{_cell(typed)}` | {_cell(_default(option))} | {_cell(meaning)} |"


def _default(option: Any) -> str:
    """An option's default; empty for a flag that is off, and where the meaning says what is chosen."""
    if option.default is None or option.default is False:
        return ""
    if option.default is True:
        return f"`{option.opts[0]}`"
    return f"`{option.default}`"


def _summary(command: Any) -> str:
    return inspect.cleandoc(command.help or "").split("\n\n")[0]


def _prose(text: str) -> str:
    """Text that Markdown shows as it is."""
    for mark in ("<", "[", "]", "*", "_"):
        text = text.replace(mark, f"\\{mark}")
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    pages = reference_pages()
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
