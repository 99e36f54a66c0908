"""A file of another tool → the nodes and groups of a cluster.yaml, and what of it could not be taken."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from skyctl.errors import InputError, InventoryError
from skyctl.files import read_text
from skyctl.inventory.cluster_template import NewNode
from skyctl.inventory.foreign.ansible_listing import (
    INSTALL_HINT,
    PROGRAM,
    AnsibleListing,
    list_inventory,
    parse_listing,
)
from skyctl.inventory.foreign.ansible_variables import ImportNotes, convert_listing
from skyctl.inventory.foreign.plain_ansible import read_plain
from skyctl.inventory.host_ranges import expand_hosts, without_slurm_ranges

# Hostfiles: of DeepSpeed and Open MPI (``host slots=4``), of MPICH and Intel MPI (``host:4``).

_HOSTFILE_LINE = re.compile(
    r"^(?:(?P<user>[^@\s:=]+)@)?(?:\[(?P<six>[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.%\w]*)\]|(?P<host>[^\s:=\[\]^]+))(?::(?P<count>\d+))?$"
)
_SLOT_KEYS = ("slots", "slot", "cpu", "count", "sockets")
_MAX_SLOTS = 1024
_HOSTFILE_KEYS = {
    **dict.fromkeys(_SLOT_KEYS, "slots"),
    **dict.fromkeys(("max_slots", "max-slots", "slots_max", "slots-max", "cpu_max", "binding"), "unused"),
    **dict.fromkeys(("user", "username", "user_name", "user-name"), "user"),
    "port": "port",
    "ifname": "interface",
}


def is_hostfile(text: str) -> bool:
    """Whether every line is a host with nothing behind it but slots and the like."""
    lines = _hostfile_lines(text)
    return bool(lines) and all(
        (words[0].startswith("^") or all(map(_HOSTFILE_LINE.match, without_slurm_ranges(words[0]))))
        and all(word.partition("=")[0].lower() in _HOSTFILE_KEYS and "=" in word for word in words[1:])
        for _, words in lines
    )


def read_hostfile(text: str, path: str, notes: ImportNotes) -> list[NewNode]:
    """The hosts; one that stands twice has the sum of its slots. ``localhost`` is this machine itself.

    Raises:
        InventoryError: with file and line.
    """
    nodes: dict[str, NewNode] = {}
    for number, words in _hostfile_lines(text):
        if words[0].startswith("^"):
            notes.add("hosts that are ruled out (^HOST) are not taken", words[0][1:])
            continue
        try:
            hosts = expand_hosts(words[0])
        except ValueError as exc:
            raise InventoryError(f"{path}:{number}: {exc}") from exc
        for host in hosts:
            node = _parse_hostfile_node([host, *words[1:]], f"{path}:{number}", notes)
            before = nodes.get(node.name)
            if before is not None:
                node = replace(node, slots=(before.slots or 0) + (node.slots or 0) or None)
            nodes[node.name] = node
    return list(nodes.values())


def _hostfile_lines(text: str) -> list[tuple[int, list[str]]]:
    """(number, words) of the lines that are not empty; ``slots = 4`` is one word."""
    lines = []
    for number, raw in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", raw.split("#")[0]).split()
        if words:
            lines.append((number, words))
    return lines


def _parse_hostfile_node(words: list[str], where: str, notes: ImportNotes) -> NewNode:
    match = _HOSTFILE_LINE.match(words[0])
    assert match is not None  # looks_so has seen it
    host = match["six"] or match["host"]
    fields = {"slots": match["count"], "user": match["user"], "port": None, "interface": None}
    for word in words[1:]:
        key, _, value = word.partition("=")
        meant = _HOSTFILE_KEYS[key.lower()]
        if meant == "unused":
            notes.add(f"{key} has no meaning here", host)
        else:
            fields[meant] = value
    for name, most in (("slots", _MAX_SLOTS), ("port", 65535)):
        given = fields[name]
        if given is not None and not (given.isascii() and given.isdigit() and 1 <= int(given) <= most):
            raise InventoryError(f"{where}: {name} of {host} is a number from 1 to {most}, not {given!r}")
    slots, port = fields["slots"], fields["port"]
    local = host in ("localhost", "127.0.0.1", "::1")
    return NewNode(
        host,
        None,
        None if local else fields["user"],
        int(port) if port and not local else None,
        local,
        interface=fields["interface"],
        slots=int(slots) if slots else None,
    )


_CLUSTER_NODES = re.compile(r"^nodes\s*:\s*(?:#.*\n\s*)*[-\[]", re.MULTILINE)
"""A list of that name is a cluster.yaml's; a mapping is a group of hosts."""


@dataclass(frozen=True)
class ForeignInventory:
    """``kind``: what the file was taken for; ``notes``: what was left out, and why."""

    kind: str
    nodes: tuple[NewNode, ...]
    groups: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


def read_foreign(path: Path) -> ForeignInventory:
    """Reads an Ansible inventory or a hostfile.

    A text in which every line is a host with nothing but slots and the like is a hostfile; all else is
    Ansible's. ``ansible-inventory`` reads that where it is installed, scripts, plugins and folders included;
    without it plain INI and YAML files are read. A listing it has printed (``.json``) is read in any case.

    Raises:
        InputError: no such file, or one that names no host.
        InventoryError: a fault in it, with file and line where they are known.
    """
    notes = ImportNotes()
    groups: dict[str, tuple[str, ...]] = {}
    text = "" if path.is_dir() else read_text(path)
    is_program = text.startswith("#!") and os.access(path, os.X_OK)
    is_yaml = path.suffix.lower() in (".yml", ".yaml", ".json")
    if is_yaml and (match := _CLUSTER_NODES.search(text)):
        line = text.count("\n", 0, match.start()) + 1
        raise InventoryError(
            f"{path}:{line}: this is a cluster.yaml already, not an inventory",
            hint=f"use it as it is: skyctl check -c {path}",
        )
    if not (is_yaml or is_program) and is_hostfile(text):
        kind, nodes = "a hostfile", read_hostfile(text, str(path), notes)
    else:
        kind, listing = _read_ansible(text, path, is_yaml=is_yaml)
        nodes, groups = convert_listing(listing, notes)
    if not nodes:
        remarks = f" ({'; '.join(notes.lines())})" if notes.lines() else ""
        raise InputError(f"{path}, taken for {kind}, has no host that can be a node{remarks}")
    return ForeignInventory(kind, tuple(nodes), groups, tuple(notes.lines()))


def _read_ansible(text: str, path: Path, *, is_yaml: bool) -> tuple[str, AnsibleListing]:
    """The kind of file, in words, and the listing of its contents."""
    if path.suffix.lower() == ".json" and '"_meta"' in text:
        return f"a listing of {PROGRAM}", parse_listing(text, str(path))
    if program := shutil.which(PROGRAM):
        return "an Ansible inventory", list_inventory(program, path)
    if path.is_dir():
        raise InputError(f"{path} is a folder", hint=f"name one file in it, or {INSTALL_HINT}")
    return f"an Ansible inventory ({'YAML' if is_yaml else 'INI'})", read_plain(text, path, is_yaml=is_yaml)
