"""The state of a lab, in ``$SKYCTL_HOME/labs/NAME/lab.json``, and the cluster files that it writes.

::

    labs/NAME/
    ├── lab.json                 this record, written before anything is made
    ├── cluster.yaml             for ``skyctl -c``; ``up(folder=…)`` puts these three elsewhere
    ├── known_hosts              the nodes' host keys
    ├── ssh_config               for ``ssh -F ssh_config n1``
    ├── id_ed25519               the key every node lets in
    ├── fabric.log               output of the process that holds the network
    └── nodes/N1/                home/, tmp/, etc/ (host key, hosts), console.log
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from skyctl.agent.process_tree import process_start_ticks
from skyctl.errors import InputError
from skyctl.files import home, lab_folder, read_text, write_atomic
from skyctl.lab.lab_spec import NAME, LabSpec
from skyctl.records.base import FileRecord, Record, Seq, parse

TAG = "SKYCTL_LAB"
"""The environment variable that marks a lab's own processes with its token."""


class LabProcess(Record):
    """A process and its start time (clock ticks since boot), so that a reused id is not mistaken for it."""

    pid: int
    started: int


class NodeState(Record):
    """One node as it was made.

    Attributes:
        port: the interface of its link's other end, in the network's namespace.
    """

    name: str
    site: str
    address: str
    mac: str
    port: str
    python: str
    process: LabProcess | None = None
    cgroups: Seq[str] = ()


class LabState(FileRecord):
    """A lab as it was made.

    Attributes:
        folder: holds cluster.yaml, known_hosts and ssh_config; often the same as ``state_folder``.
        state_folder: holds everything else.
        fabric: the process that holds the network.
        switch: what carries traffic between sites, and over lines that take time.
        launcher: by the launcher's own interfaces into the lab, their addresses.
    """

    kind: Literal["skyctl/lab"] = "skyctl/lab"
    version: Literal[2] = 2
    name: str
    token: str
    stage: Literal["starting", "up"] = "starting"
    source: str | None = None
    folder: str
    state_folder: str
    spec: LabSpec
    nodes: Seq[NodeState] = ()
    fabric: LabProcess | None = None
    switch: Literal["none", "netem", "user"] = "none"
    subnet: str | None = None
    launcher: dict[str, str] = Field(default_factory=dict)
    cgroups: Seq[str] = ()
    warnings: Seq[str] = ()

    def node(self, name: str) -> NodeState:
        """The node of that name; InputError where there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise InputError(
            f"lab {self.name!r} has no node {name!r}; it has {', '.join(n.name for n in self.nodes)}"
        )

    @property
    def cluster(self) -> Path:
        """The path of the cluster.yaml for skyctl's other commands."""
        return Path(self.folder) / "cluster.yaml"

    @property
    def known_hosts(self) -> Path:
        return Path(self.folder) / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        return Path(self.folder) / "ssh_config"

    @property
    def identity_file(self) -> Path:
        return Path(self.state_folder) / "id_ed25519"

    def node_folder(self, name: str) -> Path:
        """The folder of a node's files; ``home`` and ``tmp`` in it are its HOME and /tmp."""
        return Path(self.state_folder) / "nodes" / name


def token_of(name: str) -> str:
    """Eight hex digits unique to this lab: in names of interfaces and cgroups, and tags of processes."""
    return hashlib.sha256(f"{home()}\0{name}".encode()).hexdigest()[:8]


def check_name(name: str) -> str:
    """Checks a lab's name and returns it; InputError where it has other characters than allowed."""
    if not NAME.match(name):
        raise InputError(f"a lab's name is letters, digits, '-', '_' and '.', not {name!r}")
    return name


def state_file(name: str) -> Path:
    return lab_folder(name) / "lab.json"


def save_state(state: LabState) -> LabState:
    """Writes lab.json and returns the state."""
    write_atomic(state_file(state.name), state.to_json())
    return state


def load_state(name: str) -> LabState | None:
    """The lab of that name, None where there is none; RecordError where its file can't be read."""
    path = state_file(name)
    return parse(LabState, read_text(path), str(path)) if path.is_file() else None


def list_labs() -> list[LabState]:
    """Every lab in the state folder, sorted by name; files that can't be read are skipped."""
    folder = home() / "labs"
    states = []
    for path in sorted(folder.glob("*/lab.json")) if folder.is_dir() else []:
        with contextlib.suppress(InputError):
            states.append(parse(LabState, read_text(path), str(path)))
    return states


def find_lab(what: str | Path) -> LabState | None:
    """The lab that was made from that lab.yaml, or has that name; None where there is none."""
    source = os.path.realpath(what)
    labs = list_labs()
    for state in labs:
        if state.source == source:
            return state
    by_name = {state.name: state for state in labs}
    return by_name.get(str(what))


def free_name(source: str | Path) -> str:
    """A name for the lab of that lab.yaml: the file's stem, numbered where another lab has it."""
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in Path(source).stem)
    stem = stem.strip("_.-")[:40] or "lab"
    name, number = stem, 1
    while lab_folder(name).exists():
        number += 1
        name = f"{stem}-{number}"
    return name


def is_running(process: LabProcess | None) -> bool:
    """Whether this process, and not another one with its id, still runs."""
    return process is not None and process_start_ticks(process.pid) == process.started


def cpu_seconds(process: LabProcess | None) -> float | None:
    """The CPU seconds that a process has used; None where it is gone."""
    if process is None or not is_running(process):
        return None
    text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The files that let skyctl and ssh reach a lab: cluster.yaml, known_hosts, ssh_config.

_HEADER = "# Made by `skyctl lab up`. The nodes' host keys are in known_hosts beside it.\n"
NAMES = ("cluster.yaml", "known_hosts", "ssh_config")


def host_key(state: LabState, node: str) -> str:
    """A node's public host key as type and key, without the comment."""
    text = (state.node_folder(node) / "etc" / "host_key.pub").read_text(encoding="utf-8")
    return " ".join(text.split()[:2])


def write_cluster_files(state: LabState) -> None:
    """Writes cluster.yaml, known_hosts and ssh_config into the lab's folder."""
    folder = Path(state.folder)
    for name, text in zip(NAMES, (cluster_yaml(state), known_hosts(state), ssh_config(state)), strict=True):
        write_atomic(folder / name, text)


def cluster_yaml(state: LabState) -> str:
    """The cluster.yaml of a lab: a torch thread per whole core, for more would compete for the quota."""
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
    """The known_hosts of a lab: each node's host key, by address and by name."""
    return "".join(f"{node.address},{node.name} {host_key(state, node.name)}\n" for node in state.nodes)


def ssh_config(state: LabState) -> str:
    """The ssh_config of a lab, for ``ssh -F ssh_config NODE``."""
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
    """The /etc/hosts inside a node: every node's address."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{other.address} {other.name}" for other in state.nodes]
    return "\n".join(lines) + "\n"
