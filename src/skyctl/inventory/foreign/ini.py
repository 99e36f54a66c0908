"""An Ansible inventory in INI form: sections of hosts, variables (``:vars``) and groups (``:children``)."""

from __future__ import annotations

import ast
import re
import shlex
from typing import Any

from skyctl.errors import InventoryError
from skyctl.inventory.foreign.model import Inventory

_SECTION = re.compile(r"^\[([^:\]\s]+)(?::(\w+))?\]\s*(?:[#;].*)?$")

_SIX = re.compile(r"^\[[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:")
"""A host that is an IPv6 address, not a section."""


def read(text: str, path: str) -> Inventory:
    """The groups, hosts and variables of the file.

    Raises:
        InventoryError: a line that is none of that, or a group within another that the file does not have.
    """
    made = Inventory(path)
    section, kind = "ungrouped", "hosts"
    wanted: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("[") and not _SIX.match(line):
            section, kind = _section(line, f"{path}:{number}")
            made.group(section)
        elif kind == "hosts":
            pattern, variables = _host(line, f"{path}:{number}")
            made.add(section, pattern, variables, number)
        elif kind == "vars":
            key, equals, value = (part.strip() for part in line.partition("="))
            if not equals or not key:
                raise InventoryError(
                    f"{path}:{number}: a line of [{section}:vars] is KEY=VALUE, not {line!r}"
                )
            made.group(section).variables[key] = _value(value)
        else:
            child = line.split("#")[0].strip()
            wanted.setdefault(child, number)
            if section != "all":
                made.group(section).children[child] = None
    for child, number in wanted.items():
        if child not in made.groups:
            raise InventoryError(f"{path}:{number}: there is no group [{child}] in this file")
    return made


def _section(line: str, where: str) -> tuple[str, str]:
    found = _SECTION.match(line)
    if found is None or found[2] not in (None, "vars", "children", "hosts"):
        raise InventoryError(f"{where}: a section is [GROUP], [GROUP:vars] or [GROUP:children], not {line!r}")
    return found[1], found[2] or "hosts"


def _host(line: str, where: str) -> tuple[str, dict[str, Any]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as exc:
        raise InventoryError(f"{where}: {exc}") from exc
    variables = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise InventoryError(f"{where}: behind a host stand KEY=VALUE pairs, not {word!r}")
        variables[key] = _value(value)
    return words[0], variables


def _value(text: str) -> Any:
    """As ansible reads it: a Python literal where it is one, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
