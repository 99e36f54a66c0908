"""The inventory: which machines there are and how to reach them. ``inventory/`` reads it from YAML."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from skyctl.records.backend import BackendRequest
from skyctl.records.base import Count, FileRecord, Name, Positive, Record, Seq

DEVICE = re.compile(r"^(cpu|[a-z]+:\d+)$")


def device_id(node: str, device: str) -> str:
    """``tower`` and ``cuda:1`` (or ``cpu``) → ``tower/cuda:1`` (``tower/cpu:0``)."""
    return f"{node}/{device if ':' in device else device + ':0'}"


def split_device_id(device: str) -> tuple[str, str]:
    """``tower/cuda:1`` → (``tower``, ``cuda:1``). The node's name may itself hold no slash."""
    node, _, local = device.rpartition("/")
    return node, local


def node_of(device: str) -> str:
    """The node of a device id; an id that names no node stands for itself."""
    return split_device_id(device)[0] or device


def device_kind(device: str) -> str:
    """The kind of a device id: ``cpu``, ``cuda``, …"""
    return split_device_id(device)[1].partition(":")[0]


def is_cpu(device: str) -> bool:
    """Whether a device id is that of a node's processors."""
    return device_kind(device) == "cpu"


class Node(Record):
    """One machine. ``None`` means: find out there.

    ``host`` and ``port`` are what cluster.yaml says; for an ssh alias ``host`` is the alias itself and
    ``ssh -G`` resolves it. ``slowdown`` (local only) makes every layer take that many times its time.
    """

    name: Name
    transport: Literal["ssh", "local"] = "ssh"
    host: str | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    user: str | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None
    python: str = "python3"
    devices: Seq[str] | None = None
    threads: Count | None = None
    memory_gib: Positive | None = None
    interface: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    slowdown: float = Field(default=1.0, ge=1.0)

    @field_validator("name")
    @classmethod
    def _no_slash(cls, value: str) -> str:
        if "/" in value or value != value.strip() or any(c in value for c in "\n\r\0"):
            raise ValueError("a node's name holds no '/', no line break, and no blank at its ends")
        return value

    @field_validator("devices")
    @classmethod
    def _known_form(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for device in value or ():
            if not DEVICE.match(device):
                raise ValueError(f"a device is 'cpu' or KIND:INDEX such as 'cuda:0', not {device!r}")
        if value is not None and (not value or len(set(value)) != len(value)):
            raise ValueError("devices must name at least one device, each once")
        return value

    @model_validator(mode="after")
    def _slowdown_is_local(self) -> Node:
        if self.slowdown != 1.0 and self.transport != "local":
            raise ValueError("slowdown is for nodes with 'transport: local' only")
        return self


class Cluster(Record):
    """Nodes in inventory order, and groups of them usable wherever nodes are named.

    ``backend``: what carries tensors between their ranks, where no option says; None: the default.
    """

    name: Name
    nodes: Seq[Node] = Field(min_length=1)
    groups: dict[str, Seq[str]] = Field(default_factory=dict)
    backend: BackendRequest | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        names = [node.name for node in self.nodes]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"duplicate node {doubled[0]!r}")
        for group, members in self.groups.items():
            if group in names:
                raise ValueError(f"group {group!r} has the name of a node")
            for member in members:
                if member not in names:
                    raise ValueError(f"group {group!r} names node {member!r}, which is not in nodes")
        return self

    def node(self, name: str) -> Node:
        """The node of that name (KeyError where there is none)."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def digest(self) -> str:
        """Changes when a node is added, removed, or reached or used in another way."""
        return hashlib.sha256(self.model_dump_json(exclude={"backend"}).encode()).hexdigest()[:16]


# Environments that ``skyctl setup`` has made on a cluster's nodes: the Python used in place of the one named.


class PreparedEnvironment(Record):
    """The environment that setup has made on one node.

    ``python``: its interpreter there; ``owner``: what we are called there, to be rid of it again; ``base``:
    what the cluster file named when it was made. It counts as long as the cluster file still names that, and
    reaches the node in the same way.
    """

    python: Name
    owner: Name
    base: str
    transport: Literal["ssh", "local"]
    host: str | None
    port: int | None
    user: str | None
    proxy_jump: str | None

    @classmethod
    def of(cls, node: Node, python: str, owner: str) -> PreparedEnvironment:
        """An environment just made on that node, which is as the cluster file describes it."""
        return cls(
            python=python,
            owner=owner,
            base=node.python,
            transport=node.transport,
            host=node.host,
            port=node.port,
            user=node.user,
            proxy_jump=node.proxy_jump,
        )

    def serves(self, node: Node) -> bool:
        """Whether it is that node's, as the cluster file describes it now."""
        return self == PreparedEnvironment.of(node, self.python, self.owner)


class PreparedEnvironments(FileRecord):
    """The environments that setup has made on a cluster's nodes, by node."""

    kind: Literal["skyctl/setups"] = "skyctl/setups"
    version: Literal[1] = 1
    cluster: Name
    nodes: dict[str, PreparedEnvironment] = Field(default_factory=dict)
