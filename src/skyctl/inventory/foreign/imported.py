"""A file of another tool → the nodes and groups of a cluster.yaml, and what of it could not be taken."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from skyctl.errors import InputError
from skyctl.files import read_text
from skyctl.inventory.foreign import ansible, hostfile, ini, tree
from skyctl.inventory.foreign.model import Notes
from skyctl.inventory.init import NewNode

_DUMP = "ansible-inventory -i {path} --list --yaml > all.yml"


@dataclass(frozen=True)
class Imported:
    """``kind``: what the file was taken for; ``notes``: what was left out, and why."""

    kind: str
    nodes: tuple[NewNode, ...]
    groups: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


def read_foreign(path: Path) -> Imported:
    """Reads an Ansible inventory (YAML, INI, or ``ansible-inventory --list``), or a hostfile.

    What it is, is told by its name and content: ``.yml``, ``.yaml``, ``.json`` are Ansible's; a text in which
    every line is a host with nothing but slots and the like is a hostfile; all else is Ansible's INI.

    Raises:
        InputError: no such file, or one that names no host.
        InventoryError: a fault in it, with file and line.
    """
    dump = f"have ansible write it out: {_DUMP.format(path=path)}"
    if path.is_dir():
        raise InputError(f"{path} is a folder; --from takes one file", hint=dump)
    text = read_text(path)
    if text.startswith("#!") and os.access(path, os.X_OK):
        raise InputError(f"{path} is a program, which --from does not run", hint=dump)
    notes = Notes()
    if path.suffix.lower() in (".yml", ".yaml", ".json"):
        kind, nodes, groups = (
            "an Ansible inventory (YAML)",
            *ansible.nodes_of(tree.read(path, notes), path, notes),
        )
    elif hostfile.looks_so(text):
        kind, nodes, groups = "a hostfile", hostfile.read(text, str(path), notes), {}
    else:
        kind, nodes, groups = (
            "an Ansible inventory (INI)",
            *ansible.nodes_of(ini.read(text, str(path)), path, notes),
        )
    if not nodes:
        said = f" ({'; '.join(notes.lines())})" if notes.lines() else ""
        raise InputError(f"{path}, taken for {kind}, has no host that can be a node{said}")
    return Imported(kind, tuple(nodes), groups, tuple(notes.lines()))
