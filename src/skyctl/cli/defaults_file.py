"""Defaults of options out of a file: ``skyctl.toml``, or ``[tool.skyctl]`` of a ``pyproject.toml``.

The file lies next to the cluster file that ``-c`` or ``SKYCTL_CLUSTER`` names, else in the current folder::

    [defaults]              # every command that has such an option
    cluster = "home.yaml"

    [launch]                # this command; counts more than [defaults]
    steps = 500
    batch-size = 64

    [checkpoint.export]
    output = "weights.pt"

In a pyproject.toml the tables are ``[tool.skyctl.defaults]``, ``[tool.skyctl.launch]`` and so on. A key is
an option's long name without its dashes; within it ``-`` or ``_``. A flag is ``true`` or ``false``, an option
that may be repeated also an array. Two files with defaults in one folder are refused: neither hides the
other.

A typed option counts more than the environment, and that more than the file. The file says nothing of what a
plan file, ``--resume`` or another typed option has settled. ``checkpoint`` uses the run's own cluster,
whatever ``[defaults]`` says. A path counts from the file's folder.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from skyctl.cli.command_tree import commands_within, typed_name
from skyctl.cli.option_pairs import settled_parameters
from skyctl.errors import InputError

OWN_FILE = "skyctl.toml"
PROJECT_FILE = "pyproject.toml"
SHARED = "defaults"
"""The table of what several commands share."""
CLUSTER_VARIABLE = "SKYCTL_CLUSTER"
_FILE = "skyctl.defaults_file"
"""In a context's ``meta``: the file in use, or None."""
CLUSTER_OF_RUN = ("checkpoint ls", "checkpoint export", "checkpoint rm")
"""Commands whose cluster is the one that the run was launched with."""
_UNSET = ("help", "help_all", "version")


@dataclass(frozen=True)
class DefaultValue:
    """One option's default.

    Attributes:
        flag: the option's long name: ``--batch-size``.
        value: as the option's parser takes it.
        parsed: what that makes of it, a path as text.
        table: where in the file it stands: ``launch``, or ``defaults``.
    """

    flag: str
    value: bool | str | list[str]
    parsed: Any
    table: str


@dataclass(frozen=True)
class DefaultsFile:
    """A file of defaults: by command (``checkpoint export``) and parameter what it says."""

    path: Path
    commands: Mapping[str, Mapping[str, DefaultValue]]


def take_defaults(context: Any, words: Sequence[str]) -> None:
    """Gives a command its defaults out of the file, before its words are parsed.

    Raises:
        InputError: two such files; or a fault in the one that there is, also in another command's table.
    """
    if context.parent is None:
        return
    typed, _, _ = context.command.make_parser(context).parse_args(args=list(words))
    if any(typed.get(name) for name in _UNSET):
        return  # help is to be had whatever the file says
    named = typed.get("cluster") or os.environ.get(CLUSTER_VARIABLE)
    folder = _path(named).parent if named else Path()
    defaults = read_defaults(folder, context.find_root().command, context)
    context.meta[_FILE] = defaults
    if defaults is None:
        return
    command = typed_name(context)
    own = defaults.commands.get(command, {})
    settled = settled_parameters(command, typed)
    context.default_map = {name: default.value for name, default in own.items() if name not in settled}


def file_in_use(context: Any) -> DefaultsFile | None:
    """The file that a command's defaults come from; None: there is none."""
    defaults: DefaultsFile | None = context.meta.get(_FILE)
    return defaults


def describe_defaults(context: Any) -> str | None:
    """Which of a command's options have their values from the file; None: none of them."""
    defaults = file_in_use(context)
    if defaults is None:
        return None
    used = [
        f"{default.flag} {format_value(default.value)}"
        for name, default in defaults.commands.get(typed_name(context), {}).items()
        if (source := context.get_parameter_source(name)) is not None and source.name == "DEFAULT_MAP"
    ]
    return f"from {defaults.path}: {', '.join(used)}" if used else None


def read_defaults(folder: Path, application: Any, context: Any) -> DefaultsFile | None:
    """The file of defaults in a folder, its tables checked against the application's commands.

    Raises:
        InputError: two such files, one that can't be read, or a table, option or value that can't be.
    """
    own, project = folder / OWN_FILE, folder / PROJECT_FILE
    tables = _read_toml(own) if _is_file(own) else None
    section = _project_tables(project)
    if tables is not None and section is not None:
        raise InputError(
            f"both {own} and [tool.skyctl] of {project} have defaults",
            hint=f"move them into one of the two; {own} needs no tool.skyctl before its tables",
        )
    if tables is not None:
        return DefaultsFile(own, _Reader(own, "", application, context).read(tables))
    if section is not None:
        return DefaultsFile(project, _Reader(project, "tool.skyctl.", application, context).read(section))
    return None


def _project_tables(path: Path) -> Any:
    """The contents of ``tool.skyctl``; None: there are none, or there is no such file."""
    try:
        if not _is_file(path) or b"skyctl" not in path.read_bytes():
            return None  # also where it is no TOML: that is not ours to say
    except OSError:
        return None
    tool = _read_toml(path).get("tool")
    return tool.get("skyctl") if isinstance(tool, dict) else None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as exc:
        raise InputError(f"can't read {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"{path} is not UTF-8 text: byte {exc.start}") from exc
    except (ValueError, RecursionError) as exc:  # a number of too many digits is a ValueError, too
        raise InputError(f"{path} is not TOML: {exc or 'nested too deeply'}") from exc


def _is_file(path: Path) -> bool:
    """Whether it is a file; not where the folder can't be looked into, as the command itself will say."""
    try:
        return path.is_file()
    except OSError:
        return False


def _path(text: str | Path) -> Path:
    """A path with the user's home in place of ``~``; as it is where there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


class _Reader:
    """Reads the tables of one file; whatever is wrong is an InputError with file and key."""

    def __init__(self, path: Path, prefix: str, application: Any, context: Any) -> None:
        self._path, self._prefix, self._context = path, prefix, context
        every = dict(commands_within(application))
        self._groups = {name for name, command in every.items() if hasattr(command, "commands")}
        self._options = {
            name: {_key(option): option for option in command.params if is_settable(option)}
            for name, command in every.items()
            if name not in self._groups
        }

    def read(self, tables: Any) -> dict[str, dict[str, DefaultValue]]:
        """By command and parameter the defaults of the file's tables."""
        if not isinstance(tables, dict):
            raise self._error("", "is no table", "write tables: [launch] and so on")
        by_command: dict[str, dict[str, DefaultValue]] = {name: {} for name in self._options}
        every = {key: option for options in self._options.values() for key, option in options.items()}
        for key, value in self._own_keys(tables.get(SHARED, {}), SHARED, list(every)).items():
            for command, options in self._options.items():
                if key in options and not (key == "cluster" and command in CLUSTER_OF_RUN):
                    option = options[key]
                    by_command[command][option.name] = self._value(SHARED, key, option, value, command)
        for command, table in self._command_tables(tables, ""):
            options = self._options[command]
            place = command.replace(" ", ".")
            for key, value in self._own_keys(table, place, list(options)).items():
                option = options[key]
                by_command[command][option.name] = self._value(place, key, option, value, command)
        return {command: values for command, values in by_command.items() if values}

    def _command_tables(self, tables: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
        """(command, its table), of groups too."""
        for name, table in tables.items():
            command = f"{before}{name}"
            if command == SHARED:
                continue
            if command in self._options:
                yield command, table
            elif command in self._groups and isinstance(table, dict):
                yield from self._command_tables(table, f"{command} ")
            elif command in self._groups:
                raise self._error(command.replace(" ", "."), "is no table", None)
            else:
                raise self._unknown_table(command, table, before)

    def _unknown_table(self, command: str, table: Any, before: str) -> InputError:
        place = command.replace(" ", ".")
        key = command.replace("_", "-")
        if not isinstance(table, dict) and not before:
            owners = [name for name, options in self._options.items() if _normal(command) in options]
            hint = f"options stand in a table: [{self._prefix}{owners[0] if len(owners) == 1 else SHARED}]"
            return self._error(place, "stands in no command's table", hint)
        near = get_close_matches(key, [*self._options, *self._groups, SHARED], n=1)
        guess = f"; did you mean {near[0].replace(' ', '.')!r}?" if near else ""
        return self._error(place, f"is no command{guess}", "skyctl --help lists them")

    def _own_keys(self, table: Any, place: str, keys: Sequence[str]) -> dict[str, Any]:
        """A table's values by normal key. Raises InputError for a key that is no option."""
        if not isinstance(table, dict):
            raise self._error(place, "is no table", f"write [{self._prefix}{place}], its options below it")
        values: dict[str, Any] = {}
        for key, value in table.items():
            normal = _normal(key)
            if normal not in keys:
                near = get_close_matches(normal, [*keys, *(f"no_{word}" for word in keys)], n=1)
                near = [word if word in keys else word.removeprefix("no_") for word in near]
                guess = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
                command = "COMMAND" if place == SHARED else place.replace(".", " ")
                of = "any command" if place == SHARED else command
                raise self._error(
                    f"{place}.{key}",
                    f"is no option of {of}{guess}",
                    f"skyctl {command} --help-all lists them",
                )
            if normal in values:
                raise self._error(f"{place}.{key}", "stands there twice, with - and with _", None)
            values[normal] = value
        return values

    def _value(self, place: str, key: str, option: Any, value: Any, command: str) -> DefaultValue:
        """A value as the option's parser takes it, tried with that parser."""
        where = f"{place}.{key.replace('_', '-')}"
        flag = long_name(option)
        if option.is_flag:
            if not isinstance(value, bool):
                raise self._error(where, f"is true or false, not {_written(value)}", None)
            return DefaultValue(flag, value, value, place)
        values = value if option.multiple and isinstance(value, list) else [value]
        wrong = next((item for item in values if not _is_typed(item)), None)
        if wrong is not None:
            takes = option.metavar or "one value"
            raise self._error(where, f"takes {takes}, not {_written(wrong)}", None)
        texts = [item if isinstance(item, str) else _written(item) for item in values]
        try:
            parsed = option.process_value(self._context, texts if option.multiple else texts[0])
        except Exception as exc:
            reason = getattr(exc, "message", None) or str(exc)
            of = f" (skyctl {command})" if place == SHARED else ""
            raise self._error(where, f"can't be {_written(value)}{of}: {reason}", None) from exc
        if isinstance(parsed, int | float) and isinstance(value, str):
            raise self._error(where, f"is a number, not the text {value!r}", "write it without quotes")
        if isinstance(parsed, Path) and not isinstance(value, str):
            raise self._error(where, f"is a path, not {value!r}", "write it in quotes")
        if isinstance(parsed, Path | str):
            parsed = self._from_here(option, parsed)
            return DefaultValue(flag, parsed, parsed, place)
        return DefaultValue(flag, texts if option.multiple else texts[0], parsed, place)

    def _from_here(self, option: Any, given: Path | str) -> str:
        """A path in the file, as it is from the current folder; a text may name a file of that folder."""
        moved = self._path.parent / _path(given)
        may_name_file = str(option.metavar or "").startswith("FILE") and moved.exists()
        return str(moved) if isinstance(given, Path) or may_name_file else given

    def _error(self, key: str, what: str, hint: str | None) -> InputError:
        place = f"{self._prefix}{key}".rstrip(".")
        return InputError(f"{self._path}: {place} {what}", hint=hint)


def is_settable(parameter: Any) -> bool:
    """Whether it is an option that a file may set."""
    return parameter.param_type_name == "option" and parameter.name not in _UNSET


def long_name(option: Any) -> str:
    """The name of an option that begins with two dashes, such as ``--steps``."""
    return next(str(flag) for flag in option.opts if flag.startswith("--"))


def _key(option: Any) -> str:
    return _normal(long_name(option).removeprefix("--"))


def _normal(key: str) -> str:
    return key.replace("-", "_")


def _is_typed(value: object) -> bool:
    """Whether it is what somebody may type: a text, or a finite number."""
    return type(value) in (str, int) or (isinstance(value, float) and math.isfinite(value))


def _written(value: object) -> str:
    """A value as TOML has it, or nearly so."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return repr(value) if isinstance(value, str) else str(value)
    except ValueError:  # more digits than Python writes
        return "a number of so many digits"


def format_value(value: object) -> str:
    """An option's value as a person reads it: a flag as in TOML, several values with commas between."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
