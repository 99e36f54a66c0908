"""What is known of a lab that is up (or half up), kept in ``$SKYCTL_HOME/labs/NAME/lab.json``.

::

    labs/NAME/
    ├── lab.json                 this record, written before anything is made
    ├── cluster.yaml             for ``skyctl -c``; ``up(folder=…)`` puts these three elsewhere
    ├── known_hosts              the nodes' host keys
    ├── ssh_config               for ``ssh -F ssh_config n1``
    ├── id_ed25519               the key every node lets in
    ├── fabric.log               what the process that holds the network said
    └── nodes/N1/                home/, tmp/, etc/ (host key, hosts), console.log
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from skyctl.errors import InputError
from skyctl.files import home, lab_folder, read_text, write_atomic
from skyctl.lab.spec import NAME, LabSpec
from skyctl.records.base import FileRecord, Record, Seq, parse

TAG = "SKYCTL_LAB"
"""The environment variable that marks a lab's own processes with its token."""


class Process(Record):
    """A process and when it started (clock ticks since boot), so that a reused id is not mistaken for it."""

    pid: int
    started: int


class NodeState(Record):
    """One node as it was made. ``port``: the interface of the fabric that its link ends in."""

    name: str
    site: str
    address: str
    mac: str
    port: str
    python: str
    process: Process | None = None
    cgroups: Seq[str] = ()


class LabState(FileRecord):
    """``launcher``: address of each of its own interfaces. ``switch``: what carries traffic between sites.

    ``folder`` holds cluster.yaml, known_hosts and ssh_config, ``state_folder`` all else; often the same.
    """

    kind: Literal["skyctl/lab"] = "skyctl/lab"
    version: Literal[1] = 1
    name: str
    token: str
    stage: Literal["starting", "up"] = "starting"
    source: str | None = None
    folder: str
    state_folder: str
    spec: LabSpec
    nodes: Seq[NodeState] = ()
    fabric: Process | None = None
    switch: Literal["none", "netem", "user"] = "none"
    subnet: str | None = None
    launcher: dict[str, str] = Field(default_factory=dict)
    cgroups: Seq[str] = ()
    warnings: Seq[str] = ()

    def node(self, name: str) -> NodeState:
        """The node of that name. Raises InputError where there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise InputError(
            f"lab {self.name!r} has no node {name!r}; it has {', '.join(n.name for n in self.nodes)}"
        )

    @property
    def cluster(self) -> Path:
        """The cluster.yaml that skyctl's other commands take."""
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
        """``home`` and ``tmp`` in it are that node's HOME and /tmp, seen from outside."""
        return Path(self.state_folder) / "nodes" / name


def token_of(name: str) -> str:
    """Eight hex digits that are this lab's alone: in interface names, cgroups, and the tag of processes."""
    return hashlib.sha256(f"{home()}\0{name}".encode()).hexdigest()[:8]


def check_name(name: str) -> str:
    """Raises InputError for a name that can't be a lab's."""
    if not NAME.match(name):
        raise InputError(f"a lab's name is letters, digits, '-', '_' and '.', not {name!r}")
    return name


def state_file(name: str) -> Path:
    return lab_folder(name) / "lab.json"


def save(state: LabState) -> LabState:
    """Writes lab.json and gives the state back."""
    write_atomic(state_file(state.name), state.to_json())
    return state


def load_state(name: str) -> LabState | None:
    """The lab of that name, or None where there is none. Raises RecordError for a file that can't be read."""
    path = state_file(name)
    return parse(LabState, read_text(path), str(path)) if path.is_file() else None


def labs() -> list[LabState]:
    """Every lab this state folder knows, by name; files that can't be read are passed over."""
    folder = home() / "labs"
    found = []
    for path in sorted(folder.glob("*/lab.json")) if folder.is_dir() else []:
        with contextlib.suppress(InputError):
            found.append(parse(LabState, read_text(path), str(path)))
    return found


def find(what: str | Path) -> LabState | None:
    """The lab made from that lab.yaml, or else of that name; None where there is none."""
    source = os.path.realpath(what)
    known = labs()
    for state in known:
        if state.source == source:
            return state
    by_name = {state.name: state for state in known}
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


def started(pid: int) -> int | None:
    """When that process started, in clock ticks since boot; None where it is gone or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def alive(process: Process | None) -> bool:
    """Whether that very process still runs."""
    return process is not None and started(process.pid) == process.started


def cpu_seconds(process: Process | None) -> float | None:
    """Processor time that process has used, in seconds; None where it is gone."""
    if process is None or not alive(process):
        return None
    text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
