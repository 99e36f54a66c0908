"""Plain Ansible inventories (INI, YAML), read where ``ansible-inventory`` is not installed.

Hosts, ranges, groups and their variables are plain; a file that needs more of Ansible is refused by line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyctl.errors import InventoryError
from skyctl.inventory.foreign.ansible_listing import INSTALL_HINT, AnsibleGroup, AnsibleListing
from skyctl.inventory.foreign.ansible_variables import TAKEN_VARIABLES
from skyctl.inventory.host_ranges import MAX_HOSTS, expand_hosts
from skyctl.inventory.yaml_document import YamlDocument, YamlPath, describe_value, parse_yaml

_SECTION = re.compile(r"^\[([^:\]\s]+)(?::(\w+))?\]\s*(?:[#;].*)?$")
_IPV6_START = re.compile(r"^\[[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:")
"""A host that is an IPv6 address, not a section."""
_HOST_WITH_PORT = re.compile(
    r"^(?:\[([0-9A-Fa-f:.%\w]*:[0-9A-Fa-f:.%\w]*)\]|((?:[^:\[\]]|\[[^\[\]]*\])+)):(\d{1,5})$"
)
_NEEDS_ANSIBLE = (
    (re.compile(r"\A#!"), "a program that prints the hosts"),
    (re.compile(r"\A\$ANSIBLE_VAULT"), "sealed by ansible-vault"),
    (re.compile(r"^plugin\s*:", re.MULTILINE), "an order for a plugin of Ansible"),
    (re.compile(r"(?<=[\s:-])!(?:vault|unsafe)\b"), "a value with a tag of Ansible's"),
)


def read_plain(text: str, path: Path, *, is_yaml: bool) -> AnsibleListing:
    """The hosts and groups of the file, with the variables that count for each host.

    Of several values of a variable the innermost group's counts, and the host's own before all.

    Raises:
        InventoryError: it is no such inventory, or only Ansible can read it; file and line.
    """
    for pattern, what in _NEEDS_ANSIBLE:
        if match := pattern.search(text):
            line = text.count("\n", 0, match.start()) + 1
            raise InventoryError(f"{path}:{line}: this is {what}", hint=INSTALL_HINT)
    for folder in ("group_vars", "host_vars"):
        if (path.parent / folder).is_dir():
            raise InventoryError(
                f"{path}: {path.parent / folder} has variables of its hosts", hint=INSTALL_HINT
            )
    inventory = _PlainInventory(str(path))
    if is_yaml:
        _read_yaml(text, inventory)
    else:
        _read_ini(text, inventory)
    return inventory.listing()


@dataclass
class _PlainGroup:
    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)


class _PlainInventory:
    """The inventory as read so far. ``hosts``: with their own variables."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.hosts: dict[str, dict[str, Any]] = {}
        self.groups = {"all": _PlainGroup(), "ungrouped": _PlainGroup()}

    def group(self, name: str) -> _PlainGroup:
        """That group, made if it is new."""
        return self.groups.setdefault(name, _PlainGroup())

    def add_host(self, group: str, pattern: str, variables: Mapping[str, Any], line: int) -> None:
        """A host, or a range of them (``web[01:20]``), with a port behind it if there is one."""
        match = _HOST_WITH_PORT.match(pattern)
        name = (match[1] or match[2]) if match else pattern
        port = {"ansible_port": int(match[3])} if match else {}
        try:
            names = expand_hosts(name)
        except ValueError as exc:
            raise InventoryError(f"{self.path}:{line}: {exc}") from exc
        if len(names) + len(self.hosts) > MAX_HOSTS:
            raise InventoryError(
                f"{self.path}:{line}: with {pattern!r} there are more than {MAX_HOSTS:,} hosts"
            )
        for host in names:
            self.hosts.setdefault(host, {}).update({**port, **variables})
            self.group(group).hosts[host] = None

    def check_variable(self, name: str, value: object, line: int) -> None:
        """Raises InventoryError for a variable that counts here, but takes Ansible to know its value."""
        if name == "ansible_group_priority":
            raise InventoryError(f"{self.path}:{line}: {name} is not plain", hint=INSTALL_HINT)
        if name in TAKEN_VARIABLES and isinstance(value, str) and ("{{" in value or "{%" in value):
            raise InventoryError(
                f"{self.path}:{line}: {name} is a template",
                hint=f"write its value; or {INSTALL_HINT}, but for the template",
            )

    def listing(self) -> AnsibleListing:
        """The listing that ``ansible-inventory --list`` would print."""
        inner = {child for group in self.groups.values() for child in group.children}
        roots = [name for name in self.groups if name not in inner and name != "all"]
        self.groups["all"].children |= dict.fromkeys(roots)
        groups = {
            name: AnsibleGroup([*group.hosts], [*group.children]) for name, group in self.groups.items()
        }
        variables: dict[str, dict[str, Any]] = {host: {} for host in self.hosts}
        listing = AnsibleListing(self.path, groups, variables)
        depth = dict.fromkeys(self.groups, 0)
        for name in reversed(listing.inner_first()):
            for child in self.groups[name].children:
                depth[child] = max(depth[child], depth[name] + 1)
        members = listing.members()
        for name in sorted(self.groups, key=lambda name: (depth[name], name)):
            for host in members[name]:
                variables[host].update(self.groups[name].variables)
        for host, own in self.hosts.items():
            variables[host].update(own)
        return listing


def _read_ini(text: str, inventory: _PlainInventory) -> None:
    section, kind = "ungrouped", "hosts"
    wanted: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line, where = raw.strip(), f"{inventory.path}:{number}"
        if not line or line[0] in "#;":
            continue
        if line.startswith("[") and not _IPV6_START.match(line):
            section, kind = _parse_section(line, where)
            inventory.group(section)
        elif kind == "children":
            child = line.split("#")[0].strip()
            wanted.setdefault(child, number)
            inventory.group(section).children[child] = None
        else:
            words = _words(line, where) if kind == "hosts" else ["", line]
            pairs = [_parse_pair(word, where) for word in words[1:]]
            for name, value in pairs:
                inventory.check_variable(name, value, number)
            if kind == "hosts":
                inventory.add_host(section, words[0], dict(pairs), number)
            else:
                inventory.group(section).variables.update(pairs)
    for child, number in wanted.items():
        if child not in inventory.groups:
            raise InventoryError(f"{inventory.path}:{number}: there is no group [{child}] in this file")


def _parse_section(line: str, where: str) -> tuple[str, str]:
    match = _SECTION.match(line)
    if match is None or match[2] not in (None, "vars", "children", "hosts"):
        raise InventoryError(f"{where}: a section is [GROUP], [GROUP:vars] or [GROUP:children], not {line!r}")
    return match[1], match[2] or "hosts"


def _words(line: str, where: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as exc:
        raise InventoryError(f"{where}: {exc}") from exc


def _parse_pair(text: str, where: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise InventoryError(f"{where}: a variable is KEY=VALUE, not {text!r}")
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return key, value


def _read_yaml(text: str, inventory: _PlainInventory) -> None:
    document = parse_yaml(text, inventory.path)
    if not isinstance(document.data, dict) or not document.data:
        what = describe_value(document.data)
        raise document.error((), f"an Ansible inventory is a mapping of groups, this is {what}")
    for name in document.data:
        _read_group(document, inventory, (name,), 0)


def _read_group(document: YamlDocument, inventory: _PlainInventory, loc: YamlPath, depth: int) -> None:
    if depth > 100:
        raise document.error(loc, "groups within groups, more than 100 deep")
    name = str(loc[-1])
    group = inventory.group(name)
    document.mapping(loc, ("hosts", "vars", "children"), f"group {name!r}")
    group.variables.update(_variables(document, inventory, (*loc, "vars"), f"vars of group {name!r}"))
    for pattern in document.mapping((*loc, "hosts"), None, f"hosts of group {name!r}"):
        where = (*loc, "hosts", pattern)
        variables = _variables(document, inventory, where, f"host {pattern!r}")
        inventory.add_host(name, pattern, variables, document.line(where))
    for child in document.mapping((*loc, "children"), None, f"children of group {name!r}"):
        group.children[child] = None
        _read_group(document, inventory, (*loc, "children", child), depth + 1)


def _variables(
    document: YamlDocument, inventory: _PlainInventory, loc: YamlPath, where: str
) -> dict[str, Any]:
    variables = document.mapping(loc, None, where)
    for name, value in variables.items():
        inventory.check_variable(name, value, document.line((*loc, name)))
    return variables
