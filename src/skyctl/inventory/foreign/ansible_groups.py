"""Ansible's model, as far as hosts need it: groups within groups, variables, and which value counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from skyctl.errors import InventoryError

_MAX_HOSTS = 10_000
_RANGE = re.compile(r"\[(\d*|[A-Za-z]):(\d+|[A-Za-z])(?::(\d+))?\]")
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
        names = list(_expand_range(pattern))
        if len(names) + len(self.hosts) > _MAX_HOSTS:
            raise InventoryError(f"{self.path}:{line}: {pattern!r} makes more than {_MAX_HOSTS:,} hosts")
        if not names:
            raise InventoryError(f"{self.path}:{line}: the range in {pattern!r} is empty")
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


def _expand_range(pattern: str) -> Iterator[str]:
    """``db[1:3]`` → db1, db2, db3; ``n[08:12:2]`` keeps the leading zero; ``x[a:c]``; several in one name."""
    found = _RANGE.search(pattern)
    if found is None:
        yield pattern
        return
    first, last, step = found[1] or "0", found[2], max(1, int(found[3] or 1))
    if first.isdigit() and last.isdigit():
        width = len(first) if first.startswith("0") and len(first) > 1 else 0
        # Bounded before it is made: a typing mistake must not fill the memory.
        stop = min(int(last), int(first) + _MAX_HOSTS * step)
        middles = [str(n).zfill(width) for n in range(int(first), stop + 1, step)]
    elif not first.isdigit() and not last.isdigit():
        middles = [chr(c) for c in range(ord(first), ord(last) + 1, step)]
    else:
        middles = []
    for middle in middles:
        for rest in _expand_range(pattern[found.end() :]):
            yield f"{pattern[: found.start()]}{middle}{rest}"


# Where there are two names, the last one that is set counts, as in ansible.
