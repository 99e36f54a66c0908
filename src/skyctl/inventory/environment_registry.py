"""Environments that ``skyctl setup`` has made: kept in SKYCTL_HOME, used in place of a node's ``python``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress

from skyctl.errors import SkyctlError
from skyctl.files import make_private, read_record, setups_file, write_atomic
from skyctl.records.cluster import Cluster, PreparedEnvironment, PreparedEnvironments


def read_environments(cluster_name: str) -> PreparedEnvironments:
    """The environments that are kept of that cluster; empty if none are.

    Raises:
        InputError: the file can't be read.
        SkyctlError: somebody else could have written it.
    """
    path = setups_file(cluster_name)
    if not path.exists():
        return PreparedEnvironments(cluster=cluster_name)
    make_private(path.parent)
    return read_record(PreparedEnvironments, path, hint="remove it, and run `skyctl setup` again")


def with_prepared_environments(cluster: Cluster) -> Cluster:
    """The cluster whose nodes run the Python that setup made for them, where one did and it still counts.

    Raises:
        InputError: what is kept can't be read.
    """
    kept = read_environments(cluster.name).nodes
    if not kept:
        return cluster
    nodes = tuple(
        node.model_copy(update={"python": kept[node.name].python})
        if node.name in kept and kept[node.name].serves(node)
        else node
        for node in cluster.nodes
    )
    return cluster.model_copy(update={"nodes": nodes})


def register_environment(cluster_name: str, node: str, environment: PreparedEnvironment | None) -> None:
    """Keeps one node's environment; None: it has none any more. The file goes with its last node.

    Raises:
        SkyctlError: it can't be written.
    """
    if environment is None and not setups_file(cluster_name).exists():
        return

    def change(kept: dict[str, PreparedEnvironment]) -> None:
        if environment is None:
            kept.pop(node, None)
        else:
            kept[node] = environment

    _update_registry(cluster_name, change)


def _update_registry(cluster_name: str, change: Callable[[dict[str, PreparedEnvironment]], None]) -> None:
    """One at a time, for other commands may change the same file."""
    path = setups_file(cluster_name)
    make_private(path.parent)
    try:
        fd = os.open(path.parent / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise SkyctlError(f"can't write {path.parent / '.lock'}: {exc.strerror}") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        kept = dict(read_environments(cluster_name).nodes)
        change(kept)
        if kept:
            write_atomic(path, PreparedEnvironments(cluster=cluster_name, nodes=kept).to_json())
        else:
            with suppress(FileNotFoundError):
                path.unlink()
    finally:
        os.close(fd)
