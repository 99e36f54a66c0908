"""Ansible's hosts and variables → nodes and groups of a cluster.yaml."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyctl.errors import InventoryError
from skyctl.inventory.cluster_template import NewNode
from skyctl.inventory.foreign.ansible_listing import AnsibleListing

_FIELD_VARIABLES = {
    "host": ("ansible_host", "ansible_ssh_host"),
    "port": ("ansible_port", "ansible_ssh_port"),
    "user": ("ansible_user", "ansible_ssh_user"),
    "identity_file": ("ansible_private_key_file", "ansible_ssh_private_key_file"),
    "python": ("ansible_python_interpreter",),
}
_SSH_ARGUMENT_VARIABLES = ("ansible_ssh_common_args", "ansible_ssh_extra_args", "ansible_ssh_args")
_PASSWORD_VARIABLES = (
    "ansible_password",
    "ansible_ssh_pass",
    "ansible_ssh_password",
    "ansible_ssh_private_key_passphrase",
)
TAKEN_VARIABLES = {
    *(name for names in _FIELD_VARIABLES.values() for name in names),
    *_SSH_ARGUMENT_VARIABLES,
    "ansible_connection",
}
_KNOWN_VARIABLES = {*TAKEN_VARIABLES, *_PASSWORD_VARIABLES, "ansible_group_priority"}
_OPTIONS_WITH_VALUE = set("BbcDEeFIiJLlmOoPpQRSWw")


class ImportNotes:
    """Notes of what was left out, and of which hosts: one line each."""

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


def convert_listing(
    listing: AnsibleListing, notes: ImportNotes
) -> tuple[list[NewNode], dict[str, tuple[str, ...]]]:
    """The nodes and groups that a listing means.

    Raises:
        InventoryError: a group holds itself, a port is none.
    """
    members = listing.members()
    nodes = []
    for host in members.get("all", {}):
        node = _convert_host(host, listing.variables.get(host, {}), listing.path, notes)
        nodes += [node] if node is not None else []
    return nodes, _convert_groups(members, [node.name for node in nodes], notes)


def _convert_groups(
    members: Mapping[str, Mapping[str, None]], names: list[str], notes: ImportNotes
) -> dict[str, tuple[str, ...]]:
    groups = {}
    for group, hosts in members.items():
        inside = tuple(name for name in names if name in hosts)
        if group in ("all", "ungrouped") or not inside:
            continue
        if group in names:
            notes.add(f"group {group!r} is left out: a node is called the same")
        else:
            groups[group] = inside
    return groups


def _convert_host(host: str, variables: Mapping[str, Any], path: str, notes: ImportNotes) -> NewNode | None:
    connection = _text_variable(variables, "ansible_connection", host, notes) or "ssh"
    if connection not in ("ssh", "smart", "paramiko", "paramiko_ssh", "local", "ansible.builtin.ssh"):
        notes.add(f"left out: connected by {connection!r}, not by ssh", host)
        return None
    taken: dict[str, str | None] = {}
    for attribute, words in _FIELD_VARIABLES.items():
        texts = [_text_variable(variables, word, host, notes) for word in words]
        taken[attribute] = next((text for text in reversed(texts) if text), None)
    if (taken["python"] or "").startswith("auto"):
        taken["python"] = None  # ansible looks for one; so do we, as `python3`
    _note_unused_variables(variables, host, notes)
    if connection == "local":
        return NewNode(host, local=True, python=taken["python"])
    port = taken["port"]
    if port is not None and not (port.isdigit() and 1 <= int(port) <= 65535):
        raise InventoryError(f"{path}: host {host!r}: ansible_port is a number from 1 to 65535, not {port!r}")
    return NewNode(
        host,
        taken["host"] if taken["host"] != host else None,
        taken["user"],
        int(port) if port is not None else None,
        identity_file=taken["identity_file"],
        proxy_jump=_proxy_jump(variables, host, notes),
        python=taken["python"],
    )


def _text_variable(variables: Mapping[str, Any], name: str, host: str, notes: ImportNotes) -> str | None:
    """A variable as text; None, with a note, where only ansible knows what it comes to."""
    value = variables.get(name)
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, dict) and "__ansible_vault" in value:
        notes.add(f"{name} is sealed by ansible-vault", host)
        return None
    if not isinstance(value, str | int):
        notes.add(f"{name} is no text", host)
        return None
    text = str(value).strip()
    if "{{" in text or "{%" in text:
        notes.add(f"{name} is a template, which only ansible can fill in", host)
        return None
    return text or None


def _note_unused_variables(variables: Mapping[str, Any], host: str, notes: ImportNotes) -> None:
    """Names of what is not taken, never values: passwords are among them."""
    if any(variables.get(name) for name in _PASSWORD_VARIABLES):
        notes.add(
            "passwords are not taken: skyctl logs in with keys (ssh-copy-id HOST brings yours there)", host
        )
    for name in variables:
        if name.startswith("ansible_become"):
            notes.add("ansible_become is not taken: skyctl works as the user who logs in", host)
        elif name.startswith("ansible_") and name not in _KNOWN_VARIABLES:
            notes.add(f"{name} is not taken", host)


def _proxy_jump(variables: Mapping[str, Any], host: str, notes: ImportNotes) -> str | None:
    """The jump host that ssh's options name: ``-J``, ``ProxyJump``, ``ProxyCommand="ssh -W %h:%p HOST"``."""
    jump = None
    for name in _SSH_ARGUMENT_VARIABLES:
        text = _text_variable(variables, name, host, notes)
        if text is None:
            continue
        destination = _proxy_jump_of_arguments(text)
        jump = destination or jump
        if destination is None:
            notes.add(f"{name} is not taken; what ssh needs can stand in ~/.ssh/config", host)
    return jump


def _proxy_jump_of_arguments(text: str) -> str | None:
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    for flag, value in _ssh_options(words):
        if flag == "J":
            return value
        key, _, setting = re.sub(r"^(\w+)\s*[= ]\s*", r"\1=", value).partition("=")
        if flag == "o" and key.lower() == "proxyjump":
            return setting
        if flag == "o" and key.lower() == "proxycommand":
            return _ssh_destination(setting)
    return None


def _ssh_options(words: list[str]) -> Iterator[tuple[str, str]]:
    """(letter, value) of ssh's options; ("", word) of the other words."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-") or len(word) < 2:
            yield "", word
        elif word[1] not in _OPTIONS_WITH_VALUE:
            yield word[1], ""
        elif len(word) > 2:
            yield word[1], word[2:]
        elif at < len(words):
            yield word[1], words[at]
            at += 1


def _ssh_destination(command: str) -> str | None:
    """``ssh -W %h:%p ada@bastion`` → ``ada@bastion``; None for anything that says more."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if not words or Path(words[0]).name != "ssh":
        return None
    options = list(_ssh_options(words[1:]))
    hosts = [value for flag, value in options if flag == ""]
    plain = all(flag in ("", "W", "q") for flag, _ in options)
    return hosts[0] if plain and len(hosts) == 1 and any(flag == "W" for flag, _ in options) else None
