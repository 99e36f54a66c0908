"""How a command takes the words typed after it, and what is meant by one that skyctl has not.

Another tool's word, another command's, or a slip of the hand is looked at before the words are parsed, so
that the message is like all others and ``--json`` has its document. So are defaults out of a file.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from skyctl.cli.command_output import Output
from skyctl.cli.command_runner import report_error
from skyctl.cli.command_tree import commands_within, options_by_flag
from skyctl.cli.defaults_file import describe_defaults, take_defaults
from skyctl.cli.help_panels import ALL_OPTIONS, in_panel_order, set_panel, usual_parameters
from skyctl.cli.option_pairs import refuse_unused
from skyctl.errors import InputError

AFTER_DASHES = "skyctl.after_dashes"
"""In a context's ``meta``: whether ``--`` stood before a script's first word."""
COMMANDS_MEANT = {
    "status": ("ps", "check"),
    "runs": ("ps",),
    "list": ("ps",),
    "resume": ("launch --resume",),
    "train": ("launch",),
    "cancel": ("stop",),
    "kill": ("stop",),
    "measure": ("probe",),
    "benchmark": ("compare --measure",),
    "doctor": ("check",),
    "install": ("setup",),
}
"""By a command of other tools, which ones do that here."""
OPTIONS_MEANT = {
    "--lr": "--learning-rate",
    "--epochs": "--steps",
    "--max-steps": "--steps",
    "--precision": "--dtype",
    "--hosts": "--limit",
    "--background": "--detach",
}
"""By an option of other tools, which one says that here."""
OPTION_NOTES = {"--epochs": "a step takes one batch: steps = epochs × samples / batch size"}

SLIP = 0.8
"""How alike (``difflib``) an option is to one of ours if it may be that, and not one of the user's script."""


class SkyctlCommand(TyperCommand):
    """A command that says what may be meant by an option that it has not; refuses what it would ignore.

    Its options have defaults out of a file (``defaults_file``); its help has them in panels.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for parameter in self.params:
            if parameter.param_type_name == "option":
                set_panel(self.name, parameter)

    def get_help_option(self, ctx: Any) -> Any:
        """As typer's, in its panel."""
        option = super().get_help_option(ctx)
        if option is not None:
            set_panel(self.name, option)
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's, once all options are known and have their values, and if each of them is used."""
        words = list(args)
        if ctx.resilient_parsing:
            with contextlib.suppress(InputError):
                take_defaults(ctx, words)
            return super().parse_args(ctx, args)
        _guarded(words, lambda: _check_options(ctx, words))
        _guarded(words, lambda: take_defaults(ctx, words))
        rest = super().parse_args(ctx, args)
        _guarded(words, lambda: refuse_unused(ctx))
        return rest

    def invoke(self, ctx: Any) -> Any:
        """As typer's, once it is said which options have their values from a file."""
        if text := describe_defaults(ctx):
            Output(quiet=ctx.params.get("quiet", False)).note(text)
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As typer's, with options in the order of their panels; rare ones are counted, or listed as well."""
        shown = copy.copy(self)
        shown.params = in_panel_order(self.params)
        if not ctx.meta.get(ALL_OPTIONS):
            shown.params = usual_parameters(shown.params)
            if rare := len(self.params) - len(shown.params):
                count = f"{rare} more options: {ctx.command_path} --help-all"
                shown.epilog = "\n\n".join([count, *([self.epilog] if self.epilog else [])])
        super(SkyctlCommand, shown).format_help(ctx, formatter)


class ScriptCommand(SkyctlCommand):
    """A command that runs a script or a command of the user's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's; the context's ``meta`` says whether ``--`` stood before the first word."""
        words = list(args)
        rest = super().parse_args(ctx, args)
        at = len(words) - len(ctx.params.get("words") or ())
        ctx.meta[AFTER_DASHES] = at > 0 and words[at - 1] == "--"
        return rest


class SkyctlGroup(TyperGroup):
    """A group that says what may be meant by a command that it has not."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As typer's; a flag shows no type."""
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return parameters

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's, once no option of a command stands before it."""
        if not ctx.resilient_parsing:
            _guarded(args, lambda: _check_own_options(ctx, args))
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer's, once the command is known."""
        if not ctx.resilient_parsing:
            _guarded(args, lambda: _check_command(ctx, args[0]))
        return super().resolve_command(ctx, args)


def _guarded(args: Sequence[str], check: Callable[[], None]) -> None:
    """Runs a check of the words; ends the process with what is wrong with them."""
    try:
        check()
    except InputError as exc:
        report_error(Output(as_json="--json" in args), exc, exc.exit_code)
        sys.exit(exc.exit_code)


def _check_options(ctx: typer.Context, args: Sequence[str]) -> None:
    """Raises InputError for an option that there is not, or that has another option as its value."""
    by_flag = options_by_flag(ctx, ctx.command)
    words = iter(range(len(args)))
    for at in words:
        if args[at] == "--":
            _refuse_script_arguments(ctx, args, at)
            return
        if not (ctx.allow_interspersed_args or args[at].startswith("-")):
            return
        name, equals, _ = args[at].partition("=")
        option = by_flag.get(name)
        if option is None and (name.startswith("--") or _is_unknown_letter(ctx, name, by_flag)):
            raise _unknown_option(ctx, name, by_flag, args)
        if option is not None and not option.is_flag and not equals:
            following = args[at + 1] if at + 1 < len(args) else None
            if following is None or following.partition("=")[0] in by_flag:
                raise _no_value(ctx, option, name, following)
            next(words)


def _is_unknown_letter(ctx: typer.Context, name: str, by_flag: Mapping[str, Any]) -> bool:
    """Whether a word is an option of one letter that there is not; a value may follow a letter at once."""
    letter = name[:2]
    looks_like_one = len(letter) == 2 and letter[0] == "-" and not (letter[1].isdigit() or letter[1] == ".")
    return looks_like_one and letter not in by_flag and letter not in ctx.help_option_names


def _refuse_script_arguments(ctx: typer.Context, args: Sequence[str], at: int) -> None:
    """Raises InputError where a script's own arguments stand after ``--`` of a command that takes none."""
    script = next((word for word in args[:at] if word.endswith(".py")), None)
    if not _takes_script(ctx) and script is not None and at + 1 < len(args):
        typed = shlex.join(["skyctl", "run", script, *args[at + 1 :]])
        raise InputError(
            f"{ctx.command_path} gives {script} no arguments of its own",
            hint=f"a script that trains by itself: {typed}; model(width) of a workload: {script},width=512",
        )


def _takes_script(ctx: typer.Context) -> bool:
    """Whether the command runs a script as it is, which may have arguments of its own."""
    return any(parameter.name == "words" for parameter in ctx.command.params)


def _check_own_options(ctx: typer.Context, args: Sequence[str]) -> None:
    """Raises InputError for an option of a command that stands before that command."""
    by_flag, commands = options_by_flag(ctx, ctx.command), getattr(ctx.command, "commands", {})
    first = args[0].partition("=")[0] if args else ""
    if not first.startswith("-") or first in by_flag or first in ctx.help_option_names or first == "--":
        return
    at = next((at for at, word in enumerate(args) if word in commands), None)
    hint = f"{ctx.command_path} --help lists its commands"
    if at is not None and first in options_by_flag(ctx, commands[args[at]]):
        typed = [ctx.command_path, args[at], *args[:at], *args[at + 1 :]]
        hint = f"options stand after the command: {shlex.join(typed)}"
    raise InputError(f"{ctx.command_path} itself has no option {first}", hint=hint)


def _no_value(ctx: typer.Context, option: Any, name: str, following: str | None) -> InputError:
    completions = option.shell_complete(ctx, "")
    value = option.metavar or "value"
    newest = "the newest run: " if value == "RUN" else ""
    return InputError(
        f"{name} needs a {value}" + (f", and {following} is an option" if following is not None else ""),
        hint=f"{newest}{name} {completions[0].value}"
        if completions
        else f"{ctx.command_path} --help says what it takes",
    )


def _unknown_option(
    ctx: typer.Context, name: str, by_flag: Mapping[str, Any], args: Sequence[str]
) -> InputError:
    options = [flag[2:] for flag in by_flag if flag.startswith("--")]
    script = next((word for word in args if word.endswith(".py")), None)
    if _takes_script(ctx) and script is not None:
        at = args.index(script)
        slips = difflib.get_close_matches(name[2:], options, n=1, cutoff=SLIP)
        guess = f"; did you mean '--{slips[0]}'?" if slips else ""
        typed = shlex.join(["skyctl", "run", script, *args[:at], *args[at + 1 :]])
        where = f"--, all others before: … -- {name}" if ctx.allow_interspersed_args else f"it: {typed}"
        return InputError(
            f"{ctx.command_path} has no option {name}{guess}",
            hint=f"options of the script come after {where}",
        )
    meant = OPTIONS_MEANT.get(name, name)
    guess, hint = "", OPTION_NOTES.get(name)
    if meant in by_flag:
        guess = f"; did you mean {meant!r}?"
    else:
        near = difflib.get_close_matches(name[2:], options, n=1)
        everywhere = commands_within(ctx.find_root().command)
        others = [path for path, command in everywhere if meant in options_by_flag(ctx, command)]
        if others:
            hint = f"{meant} is an option of {', '.join(others)}"
        elif near:
            guess = f"; did you mean '--{near[0]}'?"
    return InputError(
        f"{ctx.command_path} has no option {name}{guess}",
        hint=hint or f"{ctx.command_path} --help-all lists them",
    )


def _check_command(ctx: typer.Context, word: str) -> None:
    """Raises InputError for a command that there is not."""
    commands = dict(commands_within(ctx.command))
    if word.startswith("-") or word in getattr(ctx.command, "commands", {}):
        return
    meant = _meant_by(word, commands)
    if not meant and (near := difflib.get_close_matches(word, [*commands, *COMMANDS_MEANT], n=1)):
        meant = near if near[0] in commands else _meant_by(near[0], commands)
    guess = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    raise InputError(
        f"{ctx.command_path} has no command {word!r}{guess}", hint=f"{ctx.command_path} --help lists them"
    )


def _meant_by(word: str, commands: Mapping[str, Any]) -> list[str]:
    """The commands that a word stands for: in other tools, or within a group."""
    meant = [text for text in COMMANDS_MEANT.get(word, ()) if text.partition(" ")[0] in commands]
    return meant + [path for path in commands if path.endswith(f" {word}")]
