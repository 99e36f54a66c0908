"""The files that let skyctl and ssh reach a lab: cluster.yaml, known_hosts, ssh_config."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from skyctl.files import write_atomic
from skyctl.lab.state import LabState

_HEADER = "# Made by `skyctl lab up`. The nodes' host keys are in known_hosts beside it.\n"
NAMES = ("cluster.yaml", "known_hosts", "ssh_config")


def host_key(state: LabState, node: str) -> str:
    """A node's public host key: type and key, without the comment."""
    text = (state.node_folder(node) / "etc" / "host_key.pub").read_text(encoding="utf-8")
    return " ".join(text.split()[:2])


def write(state: LabState) -> None:
    """Writes all three into the lab's folder."""
    folder = Path(state.folder)
    for name, text in zip(NAMES, (cluster_yaml(state), known_hosts(state), ssh_config(state)), strict=True):
        write_atomic(folder / name, text)


def cluster_yaml(state: LabState) -> str:
    """As many torch threads as whole cores, at least one: more would only take turns on the quota."""
    nodes = [
        {
            "name": node.name,
            "host": node.address,
            "port": 22,
            "user": "root",
            "identity_file": str(state.identity_file),
            "python": node.python,
            "threads": max(1, int(spec.cpus)),
        }
        for node, spec in zip(state.nodes, state.spec.nodes, strict=True)
    ]
    text = yaml.safe_dump({"name": state.name, "nodes": nodes}, sort_keys=False, allow_unicode=True)
    return f"{_HEADER}{text}"


def known_hosts(state: LabState) -> str:
    """Each node by address and by name."""
    return "".join(f"{node.address},{node.name} {host_key(state, node.name)}\n" for node in state.nodes)


def ssh_config(state: LabState) -> str:
    """For ``ssh -F ssh_config NODE``."""
    blocks = [f"# ssh -F {shlex.quote(str(state.ssh_config))} {state.nodes[0].name}"]
    for node in state.nodes:
        blocks.append(
            f"Host {node.name} {node.address}\n"
            f"  HostName {node.address}\n"
            f"  HostKeyAlias {node.address}\n"
            "  User root\n"
            "  Port 22\n"
            f'  IdentityFile "{state.identity_file}"\n'
            "  IdentitiesOnly yes\n"
            f'  UserKnownHostsFile "{state.known_hosts}"\n'
            "  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes"
        )
    return "\n\n".join(blocks) + "\n"


def hosts(state: LabState) -> str:
    """What /etc/hosts says inside a node: every node by its address on the network."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{other.address} {other.name}" for other in state.nodes]
    return "\n".join(lines) + "\n"
