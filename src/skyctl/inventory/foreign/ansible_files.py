"""Ansible inventories (INI, YAML, and the JSON of ``ansible-inventory --list``) as ``AnsibleInventory``."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from skyctl.errors import InventoryError
from skyctl.inventory.host_ranges import MAX_HOSTS, expand_hosts
from skyctl.inventory.yaml_document import YamlDocument, YamlPath, describe_value, load_yaml

_SECTION = re.compile(r"^\[([^:\]\s]+)(?::(\w+))?\]\s*(?:[#;].*)?$")

_IPV6_START = re.compile(r"^\[[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:")
"""A host that is an IPv6 address, not a section."""


_DYNAMIC_HINT = "have ansible write it out: ansible-inventory -i {path} --list --yaml > all.yml"

_HOST_WITH_PORT = re.compile(
    r"^(?:\[([0-9A-Fa-f:.%\w]*:[0-9A-Fa-f:.%\w]*)\]|((?:[^:\[\]]|\[[^\[\]]*\])+)):(\d{1,5})$"
)


class ImportNotes:
    """What was left out, and of which hosts: one line each."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[str, None]] = {}

    def add(self, what: str, host: str | None = None) -> None:
        """Notes what was left out of a host, once per host."""
        hosts = self._hosts.setdefault(what, {})
        if host is not None:
            hosts[host] = None

    def lines(self) -> list[str]:
        """In the order of their first occurrence."""
        return [f"{what}{_host_list(list(hosts))}" for what, hosts in self._hosts.items()]


def _host_list(hosts: list[str]) -> str:
    if not hosts:
        return ""
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    return f" ({', '.join(hosts[:3])}{more})"


@dataclass
class AnsibleGroup:
    """Hosts of its own, groups within it, variables."""

    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass
class AnsibleInventory:
    """``hosts``: in the file's order, with their own variables. ``path``: what errors call it."""

    path: str
    groups: dict[str, AnsibleGroup] = field(default_factory=lambda: {"all": AnsibleGroup()})
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def group(self, name: str) -> AnsibleGroup:
        """That group, made where it is new."""
        return self.groups.setdefault(name, AnsibleGroup())

    def add(self, group: str, pattern: str, variables: dict[str, Any], line: int) -> None:
        """A host, or a range of them (``web[01:20]``), with a port behind it where there is one."""
        found = _HOST_WITH_PORT.match(pattern)
        name = (found[1] or found[2]) if found else pattern
        port = {"ansible_port": int(found[3])} if found else {}
        for host in self._expanded(name, line):
            self.hosts.setdefault(host, {}).update({**port, **variables})
            self.group(group).hosts[host] = None

    def _expanded(self, pattern: str, line: int) -> list[str]:
        try:
            names = expand_hosts(pattern)
        except ValueError as exc:
            raise InventoryError(f"{self.path}:{line}: {exc}") from exc
        if len(names) + len(self.hosts) > MAX_HOSTS:
            raise InventoryError(
                f"{self.path}:{line}: with {pattern!r} there are more than {MAX_HOSTS:,} hosts"
            )
        return names

    def members(self, name: str, inside: tuple[str, ...] = ()) -> dict[str, None]:
        """The hosts of a group and of all groups within it, in order.

        Raises:
            InventoryError: a group holds itself.
        """
        if name in inside:
            raise InventoryError(f"{self.path}: group {name!r} holds itself")
        if name == "all":
            return dict.fromkeys(self.hosts)
        group = self.groups.get(name, AnsibleGroup())
        found = dict(group.hosts)
        for child in group.children:
            found.update(self.members(child, (*inside, name)))
        return found

    def order(self) -> list[str]:
        """Groups in the order in which their variables count, the last most: outer before inner ones, then by
        ``ansible_group_priority``, then by name."""
        depth = {"all": 0}

        def below(name: str, at: int, inside: tuple[str, ...]) -> None:
            if name in inside:
                raise InventoryError(f"{self.path}: group {name!r} holds itself")
            depth[name] = max(depth.get(name, 0), at)
            for child in self.groups.get(name, AnsibleGroup()).children:
                below(child, at + 1, (*inside, name))

        for name in self.groups:
            if name != "all":
                below(name, 1, ("all",))

        def key(name: str) -> tuple[int, int, str]:
            given = self.groups.get(name, AnsibleGroup()).variables.get("ansible_group_priority", 1)
            return depth[name], int(given) if str(given).lstrip("-").isdigit() else 1, name

        return sorted(depth, key=key)


# Where there are two names, the last one that is set counts, as in ansible.


def read_ini(text: str, path: str) -> AnsibleInventory:
    """The groups, hosts and variables of the file.

    Raises:
        InventoryError: a line that is none of that, or a group within another that the file does not have.
    """
    made = AnsibleInventory(path)
    section, kind = "ungrouped", "hosts"
    wanted: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line.startswith("[") and not _IPV6_START.match(line):
            section, kind = _parse_section(line, f"{path}:{number}")
            made.group(section)
        elif kind == "hosts":
            pattern, variables = _parse_host_line(line, f"{path}:{number}")
            made.add(section, pattern, variables, number)
        elif kind == "vars":
            key, equals, value = (part.strip() for part in line.partition("="))
            if not equals or not key:
                raise InventoryError(
                    f"{path}:{number}: a line of [{section}:vars] is KEY=VALUE, not {line!r}"
                )
            made.group(section).variables[key] = _parse_value(value)
        else:
            child = line.split("#")[0].strip()
            wanted.setdefault(child, number)
            if section != "all":
                made.group(section).children[child] = None
    for child, number in wanted.items():
        if child not in made.groups:
            raise InventoryError(f"{path}:{number}: there is no group [{child}] in this file")
    return made


def _parse_section(line: str, where: str) -> tuple[str, str]:
    found = _SECTION.match(line)
    if found is None or found[2] not in (None, "vars", "children", "hosts"):
        raise InventoryError(f"{where}: a section is [GROUP], [GROUP:vars] or [GROUP:children], not {line!r}")
    return found[1], found[2] or "hosts"


def _parse_host_line(line: str, where: str) -> tuple[str, dict[str, Any]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as exc:
        raise InventoryError(f"{where}: {exc}") from exc
    variables = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise InventoryError(f"{where}: behind a host stand KEY=VALUE pairs, not {word!r}")
        variables[key] = _parse_value(value)
    return words[0], variables


def _parse_value(text: str) -> Any:
    """As ansible reads it: a Python literal where it is one, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


# An Ansible inventory in YAML, or what ``ansible-inventory --list`` prints (JSON or YAML).


class VaultValue:
    """A value that only ansible can open (``!vault``)."""


class AnsibleYamlLoader(yaml.SafeLoader):
    """Knows ansible's own tags, and makes nothing of others."""


def _construct_tagged(_loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> object:
    return str(node.value) if tag == "unsafe" and isinstance(node, yaml.ScalarNode) else VaultValue()


AnsibleYamlLoader.add_multi_constructor("!", _construct_tagged)


def read_yaml(path: Path, notes: ImportNotes) -> AnsibleInventory:
    """The groups, hosts and variables of the file.

    Raises:
        InputError: it can't be read.
        InventoryError: it is no such inventory; file and line.
    """
    document = load_yaml(path, loader_class=AnsibleYamlLoader)
    top = document.data
    if not isinstance(top, dict) or not top:
        raise document.error(
            (), f"an Ansible inventory is a mapping of groups, this is {describe_value(top)}"
        )
    if "nodes" in top:
        hint = f"use it as it is: skyctl check -c {path}"
        raise document.error(("nodes",), "this is a cluster.yaml already, not an inventory", hint=hint)
    if "plugin" in top:
        hint = _DYNAMIC_HINT.format(path=path)
        raise document.error(("plugin",), "this asks a plugin of ansible for its hosts", hint=hint)
    made = AnsibleInventory(str(path))
    for name in top:
        if name != "_meta":
            _read_group(document, made, (name,), str(name), notes, 0)
    kept = document.at(("_meta", "hostvars"))
    for host, variables in kept.items() if isinstance(kept, dict) else ():
        if host in made.hosts and isinstance(variables, dict):
            made.hosts[host].update(variables)
    return made


def _read_group(
    document: YamlDocument, made: AnsibleInventory, loc: YamlPath, name: str, notes: ImportNotes, depth: int
) -> None:
    if depth > 100:
        raise document.error(loc, "groups within groups, more than 100 deep")
    group = made.group(name)
    for key in _group_entries(document, loc, f"group {name!r}"):
        if key == "vars":
            group.variables.update(document.mapping((*loc, key), None, f"vars of group {name!r}"))
        elif key == "hosts":
            for pattern, variables in _group_entries(
                document, (*loc, key), f"hosts of group {name!r}"
            ).items():
                where = (*loc, key, pattern)
                if variables is not None and not isinstance(variables, dict):
                    what = (
                        f"host {pattern!r}: its variables are a mapping, this is {describe_value(variables)}"
                    )
                    raise document.error(where, what)
                made.add(name, str(pattern), variables or {}, document.line(where))
        elif key == "children":
            for child in _group_entries(document, (*loc, key), f"children of group {name!r}"):
                if name != "all":
                    group.children[str(child)] = None
                _read_group(document, made, (*loc, key, child), str(child), notes, depth + 1)
        else:
            notes.add(f"{key!r} of group {name!r} is no part of an inventory")


def _group_entries(document: YamlDocument, loc: YamlPath, where: str) -> dict[str, Any]:
    """A mapping; a list or one text of names counts as one (``ansible-inventory`` prints lists)."""
    value = document.at(loc)
    if isinstance(value, str):
        return {value: None}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return dict.fromkeys(value)
    return document.mapping(loc, None, where)
