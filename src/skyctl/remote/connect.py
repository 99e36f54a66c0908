"""The transport a node names."""

from __future__ import annotations

from skyctl.records.cluster import Node
from skyctl.remote.base import ConnectOptions, Remote


def connect(node: Node, options: ConnectOptions) -> Remote:
    """A connection to the node. Errors are NodeErrors (or InputError for a key file that can't be used)."""
    if node.transport == "local":
        from skyctl.remote.local import LocalRemote

        return LocalRemote(node)
    from skyctl.remote.ssh import SshRemote

    return SshRemote(node, options)
