"""What ``skyctl setup`` has made on a cluster's nodes: the Python used in place of the one named."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from skyctl.records.base import FileRecord, Name, Record
from skyctl.records.cluster import Node


class SetUp(Record):
    """One node's environment.

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
    def of(cls, node: Node, python: str, owner: str) -> SetUp:
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
        return self == SetUp.of(node, self.python, self.owner)


class Setups(FileRecord):
    """All of one cluster, by node."""

    kind: Literal["skyctl/setups"] = "skyctl/setups"
    version: Literal[1] = 1
    cluster: Name
    nodes: dict[str, SetUp] = Field(default_factory=dict)
