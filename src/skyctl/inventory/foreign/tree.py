"""An Ansible inventory in YAML, or what ``ansible-inventory --list`` prints (JSON or YAML)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from skyctl.inventory.foreign.model import Inventory, Notes
from skyctl.inventory.yamlfile import Document, Loc, load, shown


class Sealed:
    """A value that only ansible can open (``!vault``)."""


class Loader(yaml.SafeLoader):
    """Knows ansible's own tags, and makes nothing of others."""


def _tagged(_loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> object:
    return str(node.value) if tag == "unsafe" and isinstance(node, yaml.ScalarNode) else Sealed()


Loader.add_multi_constructor("!", _tagged)

_DYNAMIC = "have ansible write it out: ansible-inventory -i {path} --list --yaml > all.yml"


def read(path: Path, notes: Notes) -> Inventory:
    """The groups, hosts and variables of the file.

    Raises:
        InputError: it can't be read.
        InventoryError: it is no such inventory; file and line.
    """
    document = load(path, loader_class=Loader)
    top = document.data
    if not isinstance(top, dict) or not top:
        raise document.error((), f"an Ansible inventory is a mapping of groups, this is {shown(top)}")
    if "nodes" in top:
        hint = f"use it as it is: skyctl check -c {path}"
        raise document.error(("nodes",), "this is a cluster.yaml already, not an inventory", hint=hint)
    if "plugin" in top:
        hint = _DYNAMIC.format(path=path)
        raise document.error(("plugin",), "this asks a plugin of ansible for its hosts", hint=hint)
    made = Inventory(str(path))
    for name in top:
        if name != "_meta":
            _group(document, made, (name,), str(name), notes, 0)
    kept = document.at(("_meta", "hostvars"))
    for host, variables in kept.items() if isinstance(kept, dict) else ():
        if host in made.hosts and isinstance(variables, dict):
            made.hosts[host].update(variables)
    return made


def _group(document: Document, made: Inventory, loc: Loc, name: str, notes: Notes, depth: int) -> None:
    if depth > 100:
        raise document.error(loc, "groups within groups, more than 100 deep")
    group = made.group(name)
    for key in _entries(document, loc, f"group {name!r}"):
        if key == "vars":
            group.variables.update(document.mapping((*loc, key), None, f"vars of group {name!r}"))
        elif key == "hosts":
            for pattern, variables in _entries(document, (*loc, key), f"hosts of group {name!r}").items():
                where = (*loc, key, pattern)
                if variables is not None and not isinstance(variables, dict):
                    what = f"host {pattern!r}: its variables are a mapping, this is {shown(variables)}"
                    raise document.error(where, what)
                made.add(name, str(pattern), variables or {}, document.line(where))
        elif key == "children":
            for child in _entries(document, (*loc, key), f"children of group {name!r}"):
                if name != "all":
                    group.children[str(child)] = None
                _group(document, made, (*loc, key, child), str(child), notes, depth + 1)
        else:
            notes.add(f"{key!r} of group {name!r} is no part of an inventory")


def _entries(document: Document, loc: Loc, where: str) -> dict[str, Any]:
    """A mapping; a list or one text of names counts as one (``ansible-inventory`` prints lists)."""
    value = document.at(loc)
    if isinstance(value, str):
        return {value: None}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return dict.fromkeys(value)
    return document.mapping(loc, None, where)
