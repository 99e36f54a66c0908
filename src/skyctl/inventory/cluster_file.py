"""cluster.yaml → ``Cluster``. Every complaint names the file and the line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from skyctl.errors import InputError, InvalidRecordError
from skyctl.inventory.yaml_document import (
    YamlDocument,
    describe_value,
    load_yaml,
    nearest_word_hint,
    quoting_advice,
)
from skyctl.records.cluster import Cluster, Node

DEFAULT_PATH = "cluster.yaml"
TOP_KEYS = ("name", "backend", "defaults", "nodes", "groups")
NODE_KEYS = tuple(Node.model_fields)
DEFAULT_KEYS = tuple(key for key in NODE_KEYS if key not in ("name", "host"))
SSH_KEYS = ("host", "port", "user", "identity_file", "proxy_jump")
"""Keys that say how to reach a node; a ``transport: local`` node has none of them."""

_NO_CLUSTER_HINT = "write one with `skyctl init`, or see it all work on this machine with `skyctl demo`"


def cluster_path(given: str | Path | None = None) -> Path:
    """The cluster.yaml in use: the one given (``-c``), else SKYCTL_CLUSTER, else ./cluster.yaml.

    Raises:
        InputError: there is none; the hint says how to make one.
    """
    path = Path(given or os.environ.get("SKYCTL_CLUSTER") or DEFAULT_PATH).expanduser()
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"the cluster file {path} {what}", hint=_NO_CLUSTER_HINT)
    return path


def read_cluster(path: str | Path) -> Cluster:
    """Reads one cluster.yaml.

    A node that is a text is an ssh alias (or ``user@host``); a node without ``host`` is dialled by its name.
    ``defaults`` fill what a node leaves out (``env`` is merged); local nodes take none of the defaults that
    say how to reach a node, and run skyctl's own Python where they do not name one.

    Raises:
        InputError: the file can't be read.
        InventoryError: anything wrong in it, with file and line.
    """
    return parse_cluster(load_yaml(path, hint=_NO_CLUSTER_HINT))


def parse_cluster(document: YamlDocument) -> Cluster:
    """The cluster that a YAML file already loaded describes. Raises InventoryError."""
    top = document.mapping((), TOP_KEYS, "the file")
    defaults = document.mapping(("defaults",), DEFAULT_KEYS, "defaults")
    _check_defaults(document, defaults)
    items = document.sequence(("nodes",), "nodes")
    if not items:
        raise document.error(
            ("nodes",), "nodes is empty; a cluster needs at least one node", hint=_NO_CLUSTER_HINT
        )
    nodes: dict[str, Node] = {}
    for index in range(len(items)):
        loc = ("nodes", index)
        node = _parse_node(document, loc, defaults)
        if node.name in nodes:
            first = document.line(("nodes", list(nodes).index(node.name)))
            raise document.error(loc, f"duplicate node {node.name!r} (first on line {first})")
        nodes[node.name] = node
    name = document.text(("name",), "name") if "name" in top else default_name(document.path)
    try:
        return Cluster(
            name=name,
            nodes=tuple(nodes.values()),
            groups=_parse_groups(document, nodes),
            backend=top.get("backend"),
        )
    except InvalidRecordError as exc:
        raise document.validation(exc, (), "the file") from exc


def default_name(path: str | Path) -> str:
    """The name of a cluster whose file does not say one: the file's name, or its folder's."""
    stem = Path(path).stem
    return stem if stem not in ("cluster", "") else Path(path).resolve().parent.name.strip() or "cluster"


def _parse_node(document: YamlDocument, loc: tuple[str | int, ...], defaults: dict[str, Any]) -> Node:
    item = document.at(loc)
    if isinstance(item, str):
        if defaults.get("transport") == "local":
            item = {"name": item}
        fields = _parse_alias(document, loc, item) if isinstance(item, str) else item
        where = f"node {item!r}"
    elif isinstance(item, dict):
        where = f"node {item.get('name', item.get('host', int(loc[-1]) + 1))!r}"
        fields = dict(document.mapping(loc, NODE_KEYS, where))
        if fields.get("transport") == "local" or defaults.get("transport") == "local":
            _check_local(document, loc, fields, where)
        if "name" not in fields and "host" not in fields:
            raise document.error(loc, f"{where} has no name")
        fields.setdefault("name", fields.get("host"))
    else:
        actual = f"{describe_value(item)}{quoting_advice(item)}"
        raise document.error(loc, f"a node is an ssh alias or a mapping with a name, it is {actual}")
    local = fields.get("transport", defaults.get("transport")) == "local"
    for key, value in defaults.items():
        if key == "env" and isinstance(fields.get("env"), dict):
            fields["env"] = {**value, **fields["env"]}
        elif not (local and key in (*SSH_KEYS, "python")) and (local or key != "slowdown"):
            fields.setdefault(key, value)
    if local:
        fields.setdefault("python", sys.executable or "python3")
    else:
        fields.setdefault("host", fields["name"])
    for key in ("name", "host", "user", "proxy_jump"):
        # `ssh -oProxyCommand=…` runs a command: nothing that ssh reads may look like an option.
        if isinstance(fields.get(key), str) and fields[key].startswith("-"):
            raise document.error((*loc, key), f"{key!r} in {where} may not begin with '-'")
    try:
        return Node(**fields)
    except InvalidRecordError as exc:
        raise document.validation(exc, loc, where) from exc


def _parse_alias(document: YamlDocument, loc: tuple[str | int, ...], text: str) -> dict[str, Any]:
    user, at, host = text.rpartition("@")
    if not host.strip() or (at and not user) or any(c.isspace() for c in text):
        raise document.error(loc, f"{text!r} is no ssh alias and no user@host")
    return {"name": host, "host": host, "user": user} if at else {"name": text, "host": text}


def _check_defaults(document: YamlDocument, defaults: dict[str, Any]) -> None:
    transport = defaults.get("transport", "ssh")
    try:
        probe = dict(defaults)
        # slowdown is for local nodes; as a default it reaches only those.
        Node(**{**probe, "name": "defaults", "transport": "local" if "slowdown" in probe else transport})
        if transport not in ("ssh", "local"):
            Node(name="defaults", transport=transport)
    except InvalidRecordError as exc:
        raise document.validation(exc, ("defaults",), "defaults") from exc


def _check_local(
    document: YamlDocument, loc: tuple[str | int, ...], fields: dict[str, Any], where: str
) -> None:
    if fields.get("transport", "local") != "local":
        return
    for key in SSH_KEYS:
        if key in fields:
            raise document.error((*loc, key), f"{key!r} in {where} has no meaning with 'transport: local'")


def _parse_groups(document: YamlDocument, nodes: dict[str, Node]) -> dict[str, tuple[str, ...]]:
    given = document.mapping(("groups",), None, "groups")
    groups: dict[str, tuple[str, ...]] = {}

    def expand(group: str, open_groups: tuple[str, ...]) -> tuple[str, ...]:
        if group in open_groups:
            raise document.error(("groups", group), f"group {group!r} holds itself")
        if group in groups:
            return groups[group]
        names: dict[str, None] = {}
        for index in range(len(document.sequence(("groups", group), f"group {group!r}"))):
            loc = ("groups", group, index)
            member = document.text(loc, f"a member of group {group!r}")
            if member in nodes:
                names[member] = None
            elif member in given:
                names.update(dict.fromkeys(expand(member, (*open_groups, group))))
            else:
                choices = (*nodes, *given)
                message = (
                    f"group {group!r} names {member!r}, which is no node{nearest_word_hint(member, choices)}"
                )
                raise document.error(loc, message)
        groups[group] = tuple(names)
        return groups[group]

    for group in given:
        if group in nodes:
            raise document.error(("groups", group), f"group {group!r} has the name of a node")
        if not group or group[0] in "!&" or "," in group or group == "all":
            raise document.error(("groups", group), f"a group can't be called {group!r}")
        expand(group, ())
    return {group: groups[group] for group in given}
