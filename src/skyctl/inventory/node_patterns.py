"""Patterns of node names, as ``--limit`` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from skyctl.errors import InputError
from skyctl.inventory.yaml_document import nearest_word
from skyctl.records.cluster import Cluster


def match_nodes(cluster: Cluster, pattern: str) -> tuple[str, ...]:
    """The nodes that ``pattern`` names, in inventory order.

    ``tower``, ``gpu-*`` (glob), a group, ``all``; several with commas. ``!x`` leaves those out; ``&x`` keeps
    only those. Only exclusions: of all nodes. Of ansible's patterns, without its colons and ranges.

    Raises:
        InputError: a part that matches no node, or nothing left; the message names the nodes there are.
    """
    parts = [part.strip() for part in pattern.split(",") if part.strip()]
    everything = [node.name for node in cluster.nodes]
    if not parts:
        raise InputError(f"the node pattern {pattern!r} is empty{_available_nodes(cluster, everything)}")
    kept: set[str] = set()
    if all(part[0] in "!&" for part in parts):
        kept = set(everything)
    # As in ansible, the order of the parts does not matter: first added, then narrowed, then left out.
    for part in sorted(parts, key=lambda p: {"&": 1, "!": 2}.get(p[0], 0)):
        names = _names_matching(cluster, everything, part.lstrip("!&").strip() if part[0] in "!&" else part)
        if not names:
            close = nearest_word(part.lstrip("!& "), (*everything, *cluster.groups))
            guess = f"; did you mean {close!r}?" if close is not None else ""
            raise InputError(f"no node matches {part!r}{_available_nodes(cluster, everything)}{guess}")
        if part[0] == "!":
            kept -= names
        elif part[0] == "&":
            kept &= names
        else:
            kept |= names
    if not kept:
        raise InputError(
            f"the node pattern {pattern!r} leaves no node{_available_nodes(cluster, everything)}"
        )
    return tuple(name for name in everything if name in kept)


def select_nodes(cluster: Cluster, limit: str | None) -> Cluster:
    """The cluster with only the nodes of ``limit`` (None: all of them); groups keep what is left of them.

    Raises:
        InputError: as ``match_nodes``.
    """
    if limit is None:
        return cluster
    names = match_nodes(cluster, limit)
    return cluster.model_copy(
        update={
            "nodes": tuple(node for node in cluster.nodes if node.name in names),
            "groups": {g: tuple(m for m in members if m in names) for g, members in cluster.groups.items()},
        }
    )


def _names_matching(cluster: Cluster, everything: Sequence[str], part: str) -> set[str]:
    if part in cluster.groups:
        return set(cluster.groups[part])
    if part == "all":
        return set(everything)
    if part in everything:
        return {part}
    names = {name for name in everything if fnmatchcase(name, part)}
    for group, members in cluster.groups.items():
        if fnmatchcase(group, part):
            names.update(members)
    return names


def _available_nodes(cluster: Cluster, everything: Sequence[str]) -> str:
    groups = f"; groups: {', '.join(cluster.groups)}" if cluster.groups else ""
    return f" (nodes: {', '.join(everything)}{groups})"
