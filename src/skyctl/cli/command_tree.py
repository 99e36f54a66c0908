"""The commands of an application, and the options that each of them has, as its parser knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def options_by_flag(context: Any, command: Any) -> dict[str, Any]:
    """A command's options, by each of their names."""
    options = [option for option in command.get_params(context) if option.param_type_name == "option"]
    return {name: option for option in options for name in (*option.opts, *option.secondary_opts)}


def commands_within(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """All commands within a group and groups in it, as they are typed after it; groups as well."""
    for name, command in getattr(group, "commands", {}).items():
        yield f"{before}{name}", command
        yield from commands_within(command, f"{before}{name} ")


def typed_name(context: Any) -> str:
    """A command as it is typed after ``skyctl``: ``checkpoint ls``; empty for the application itself."""
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, str(context.info_name))
        context = context.parent
    return " ".join(names)
