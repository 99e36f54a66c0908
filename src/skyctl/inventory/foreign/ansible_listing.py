"""Hosts and groups of an Ansible inventory, as ``ansible-inventory --list`` prints them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from skyctl.errors import InventoryError

PROGRAM = "ansible-inventory"
INSTALL_HINT = f"install ansible-core, then {PROGRAM} reads it"
TIMEOUT_S = 120.0
"""Scripts and plugins may ask a cloud for their hosts."""


@dataclass(frozen=True)
class AnsibleGroup:
    """Hosts of its own, and groups within it."""

    hosts: Sequence[str] = ()
    children: Sequence[str] = ()


@dataclass(frozen=True)
class AnsibleListing:
    """``variables``: by host, those of its groups included. ``path``: the file's name in errors."""

    path: str
    groups: Mapping[str, AnsibleGroup]
    variables: Mapping[str, Mapping[str, Any]]

    def inner_first(self) -> list[str]:
        """All groups, each after those within it. Raises InventoryError if one holds itself."""
        try:
            return list(TopologicalSorter({n: g.children for n, g in self.groups.items()}).static_order())
        except CycleError as exc:
            raise InventoryError(f"{self.path}: group {exc.args[1][0]!r} holds itself") from exc

    def members(self) -> dict[str, dict[str, None]]:
        """By group the hosts in it and in all groups within it, in order."""
        members: dict[str, dict[str, None]] = {}
        for name in self.inner_first():
            group = self.groups.get(name, AnsibleGroup())
            members[name] = dict.fromkeys(group.hosts)
            for child in group.children:
                members[name] |= members[child]
        return members


def list_inventory(program: str, path: Path) -> AnsibleListing:
    """Has ``ansible-inventory`` read the inventory; it runs the scripts and plugins that this names.

    Raises:
        InventoryError: it fails, takes too long, or prints something else than a listing.
    """
    command = [program, "--list", "-i", str(path.absolute())]
    settings = {"ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true", "ANSIBLE_NOCOLOR": "true"}
    try:
        # In a session of its own it can't ask at the terminal, and can be ended with all that it started.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | settings,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as exc:
        raise InventoryError(f"{program} can't be started: {exc}") from exc
    with process:
        try:
            printed, complaints = process.communicate(timeout=TIMEOUT_S)
        except BaseException as exc:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(exc, subprocess.TimeoutExpired):
                raise
            raise InventoryError(
                f"{path}: {PROGRAM} did not end within {TIMEOUT_S:g} s",
                hint=f"see what it waits for: {PROGRAM} --list -i {path}",
            ) from exc
    if process.returncode != 0:
        lines = [line.strip() for line in complaints.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("[ERROR]", "ERROR"))]
        first = (errors or lines or [f"exit code {process.returncode}"])[0]
        raise InventoryError(
            f"{path}: {PROGRAM} failed: {first}", hint=f"see all it says: {PROGRAM} --list -i {path}"
        )
    return parse_listing(printed, str(path))


def parse_listing(text: str, path: str) -> AnsibleListing:
    """A listing from its JSON. Raises InventoryError for anything else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InventoryError(f"{path}: the listing of {PROGRAM} is not JSON: {exc}") from exc
    groups = dict(_mapping(document, path, "the whole"))
    meta = _mapping(groups.pop("_meta", {}), path, "_meta")
    variables = _mapping(meta.get("hostvars", {}), path, "hostvars")
    return AnsibleListing(
        path,
        {name: _group(_mapping(entry, path, name), path, name) for name, entry in groups.items()},
        {host: _mapping(entry, path, host) for host, entry in variables.items()},
    )


def _mapping(value: Any, path: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InventoryError(f"{path}: in the listing of {PROGRAM}, {where!r} is no mapping")
    return value


def _group(entry: Mapping[str, Any], path: str, name: str) -> AnsibleGroup:
    if entry.get("vars"):
        raise InventoryError(
            f"{path}: group {name!r} has variables of its own", hint="list it without --export"
        )
    name_lists = []
    for key in ("hosts", "children"):
        names = entry.get(key, [])
        if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
            raise InventoryError(f"{path}: {key} of group {name!r} are no list of names")
        name_lists.append(names)
    return AnsibleGroup(*name_lists)
