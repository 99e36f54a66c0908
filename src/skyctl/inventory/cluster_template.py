"""Writes a first cluster.yaml: from hosts, the aliases of ~/.ssh/config, or another tool's inventory.

The code that reads other tools' files is in ``foreign/``.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import yaml

from skyctl.errors import InputError
from skyctl.inventory.cluster_file import parse_cluster
from skyctl.inventory.host_ranges import expand_hosts
from skyctl.inventory.yaml_document import parse_yaml

_MAX_INCLUDE_DEPTH = 16  # as OpenSSH's own limit
_HOST = re.compile(
    r"^(?:(?P<user>[^@\s]+)@)?(?:\[(?P<six>[^\]\s]+)\]|(?P<host>[^\s:@]+))(?::(?P<port>\d+))?$"
)

_TEMPLATE = """\
# The machines that skyctl may use. `skyctl check` tries each of them and says what to do about what fails.
# A node needs Python 3.10 or newer with torch, and an SSH server; nothing else.
name: {name}

# What every node takes unless it says otherwise:
{defaults}

nodes:
{nodes}
{groups}
# All that a node may say:
#   - name: tower
#     host: 192.0.2.10              # default: the name, which may be an alias of ~/.ssh/config
#     port: 22
#     user: ada
#     identity_file: ~/.ssh/id_ed25519
#     proxy_jump: bastion
#     python: /opt/venv/bin/python  # default: python3
#     devices: [cuda:0, cuda:1]     # default: all accelerators, else cpu
#     threads: 8                    # of the cpu device
#     memory_gib: 20                # a cap; default: what is free there
#     interface: tailscale0         # that its peers reach it by; default: the route to them
#     env: {{OMP_NUM_THREADS: "8"}}
#   - {{name: laptop, transport: local}}   # this machine itself, without SSH; slowdown: 2 halves its speed
{no_groups}"""
_NO_DEFAULTS = "# defaults: {user: ada, identity_file: ~/.ssh/id_ed25519, python: python3}"
_NO_GROUPS = """
# Usable wherever nodes are named (--limit, --pin-first, --pin-last):
# groups: {fast: [tower]}
"""
_DEFAULTABLE_KEYS = ("user", "port", "identity_file", "proxy_jump", "python")
"""The keys that are written once, as a default, if all nodes that are reached over SSH have them alike."""

SlotsAs = Literal["cuda", "threads", "ignore"]


@dataclass(frozen=True)
class NewNode:
    """A node to be written. ``host`` None and not ``local``: a bare alias.

    ``slots``: what a hostfile says of it, which may mean GPUs or processes: see ``apply_slots``.
    """

    name: str
    host: str | None = None
    user: str | None = None
    port: int | None = None
    local: bool = False
    identity_file: str | None = None
    proxy_jump: str | None = None
    python: str | None = None
    devices: tuple[str, ...] = ()
    threads: int | None = None
    interface: str | None = None
    slots: int | None = None


def apply_slots(nodes: Sequence[NewNode], meant: SlotsAs) -> list[NewNode]:
    """The nodes with their slots taken as so many GPUs, as torch threads of the CPU, or for nothing."""
    if meant == "ignore":
        return list(nodes)
    return [
        node
        if not node.slots
        else replace(node, devices=tuple(f"cuda:{i}" for i in range(node.slots)))
        if meant == "cuda"
        else replace(node, threads=node.slots)
        for node in nodes
    ]


def parse_hosts(text: str) -> list[NewNode]:
    """As ``parse_host``, of one word that may stand for several hosts: ``gpu[1-3,7],cpu01``.

    Raises:
        InputError: it is none, or makes too many.
    """
    try:
        return [parse_host(host) for host in expand_hosts(text)]
    except ValueError as exc:
        raise InputError(f"{text!r} is no list of hosts: {exc}") from exc


def parse_host(text: str) -> NewNode:
    """``tower``, ``ada@192.0.2.10``, ``ada@192.0.2.10:2222``, ``[2001:db8::1]:22`` → a node.

    Raises:
        InputError: it is none of these.
    """
    match = _HOST.match(text)
    if match is None and text.count(":") > 1 and re.fullmatch(r"(?:[^@\s]+@)?[0-9A-Fa-f:.%\w]+", text):
        user, _, host = text.rpartition("@")
        return NewNode(host, host, user or None)
    if match is None or text.startswith("-"):
        raise InputError(f"{text!r} is no host: give an ssh alias, or [user@]host[:port]")
    host = match["six"] or match["host"]
    if host.startswith("-") or "/" in host:
        raise InputError(f"{text!r} is no host: {host!r} can't be the name of one")
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 1 <= port <= 65535:
        raise InputError(f"{text!r}: a port is a number from 1 to 65535, not {port}")
    if match["user"] is None and port is None and not match["six"]:
        return NewNode(host)
    return NewNode(host, host, match["user"], port)


def local_nodes(count: int) -> list[NewNode]:
    """This machine, as that many nodes."""
    if count == 1:
        return [NewNode("local", local=True)]
    return [NewNode(f"local-{i + 1}", local=True) for i in range(count)]


def render_cluster_file(
    nodes: Sequence[NewNode], cluster_name: str, groups: Mapping[str, Sequence[str]] | None = None
) -> str:
    """The text of a cluster.yaml of these nodes and groups, with comments on what else may stand there.

    Raises:
        InputError: no node, or a node twice.
    """
    names = [node.name for node in nodes]
    if not names:
        raise InputError("no node to write")
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise InputError(f"host {doubled[0]!r} is given twice")
    shared = _shared_defaults(nodes)
    lines = "\n".join(f"  - {_node_entry(node, shared)}" for node in nodes)
    text = _TEMPLATE.format(
        name=_scalar(cluster_name),
        defaults=f"defaults: {_flow_mapping(shared)}" if shared else _NO_DEFAULTS,
        nodes=lines,
        groups=_group_lines(groups) if groups else "",
        no_groups="" if groups else _NO_GROUPS,
    )
    parse_cluster(parse_yaml(text, "the new cluster file"))  # never writes what it would not read
    return text


def _shared_defaults(nodes: Sequence[NewNode]) -> dict[str, str | int]:
    """The settings that two or more nodes, all that are reached over SSH, have alike."""
    remote = [node for node in nodes if not node.local]
    alike = {key: {getattr(node, key) for node in remote} for key in _DEFAULTABLE_KEYS}
    return {
        key: values.pop()
        for key, values in alike.items()
        if len(remote) > 1 and len(values) == 1 and None not in values
    }


def _node_entry(node: NewNode, shared: Mapping[str, object]) -> str:
    fields: dict[str, str | int | Sequence[str]] = {"name": node.name}
    if node.local:
        fields["transport"] = "local"
    for key in ("host", *_DEFAULTABLE_KEYS, "devices", "threads", "interface"):
        value = getattr(node, key)
        if value and key not in shared and not (node.local and key in ("host", *_DEFAULTABLE_KEYS[:-1])):
            fields[key] = value
    return _scalar(node.name) if list(fields) == ["name"] else _flow_mapping(fields)


def _group_lines(groups: Mapping[str, Sequence[str]]) -> str:
    lines = [f"  {_scalar(name)}: [{', '.join(map(_scalar, members))}]" for name, members in groups.items()]
    return "\n".join(
        ["", "# Usable wherever nodes are named (--limit, --pin-first, --pin-last):", "groups:", *lines, ""]
    )


def _flow_mapping(fields: Mapping[str, str | int | Sequence[str]]) -> str:
    """A YAML mapping on one line."""

    def shown(value: str | int | Sequence[str]) -> str:
        if isinstance(value, int):
            return str(value)
        return _scalar(value) if isinstance(value, str) else f"[{', '.join(map(_scalar, value))}]"

    return f"{{{', '.join(f'{key}: {shown(value)}' for key, value in fields.items())}}}"


def _scalar(text: str) -> str:
    plain = re.fullmatch(r"[\w~/](?:[\w.@/-]|:(?=\d))*", text)
    # YAML takes JSON's quotes; what can't be seen would be lost or forbidden there, unless it is escaped.
    quoted = json.dumps(text, ensure_ascii=not text.isprintable())
    return text if plain and yaml.safe_load(text) == text else quoted


def ssh_aliases(config: Path | None = None) -> list[str]:
    """The hosts that an OpenSSH client configuration names, in its order, files it includes too.

    Patterns (``*``, ``?``, ``!``) are left out, and so are hosts whose user is ``git``: those serve
    repositories, not shells. A missing file has none.
    """
    path = config or Path.home() / ".ssh" / "config"
    aliases: dict[str, None] = {}
    _collect_aliases(path, path.parent, aliases, 0)
    return list(aliases)


def _collect_aliases(path: Path, ssh_folder: Path, aliases: dict[str, None], depth: int) -> None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    block: list[str] = []
    for line in lines:
        keyword, values = _split_config_line(line)
        if keyword == "host":
            block = [v for v in values if not any(c in v for c in "*?!") and not v.startswith("-")]
            aliases.update(dict.fromkeys(block))
        elif keyword == "match":
            block = []
        elif keyword == "user" and values[:1] == ["git"]:
            for alias in block:
                aliases.pop(alias, None)
        elif keyword == "include" and depth < _MAX_INCLUDE_DEPTH:
            for value in values:
                pattern = Path(value).expanduser()
                whole = pattern if pattern.is_absolute() else ssh_folder / pattern
                for inner in sorted(glob.glob(str(whole))):  # noqa: PTH207  (an absolute pattern)
                    _collect_aliases(Path(inner), ssh_folder, aliases, depth + 1)


def _split_config_line(line: str) -> tuple[str, list[str]]:
    """``Host a "b c"``, ``Host=a`` → (``host``, [``a``, …]); comments and broken quotes → nothing."""
    match = re.match(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*)", line)
    if match is None:
        return "", []
    try:
        return match[1].lower(), shlex.split(match[2], comments=True)
    except ValueError:
        return "", []
