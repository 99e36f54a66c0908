"""Numbers by node that ``skyctl run`` is given or knows: ranks, samples of a step, speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skyctl.errors import InputError

if TYPE_CHECKING:
    from skyctl.records.cluster import Cluster

GPU = "gpu"
"""The word of ``--per-node`` for a rank on each accelerator."""


def uncounted_nodes(asked: str | None, cluster: Cluster) -> list[str]:
    """The nodes to be asked how many accelerators they have: ``--per-node gpu``, and nobody knows."""
    if asked != GPU:
        return []
    gpus = _gpus_by_node(cluster)
    return [node.name for node in cluster.nodes if node.name not in gpus]


def ranks_by_node(asked: str | None, cluster: Cluster, counted: Mapping[str, int]) -> dict[str, int]:
    """By node, how many ranks it has.

    Args:
        asked: the value of ``--per-node``.
        counted: by node, accelerators that it has said itself.

    Raises:
        InputError: that is not known, is no number, or is nobody's.
    """
    if asked is not None and asked.isdecimal():
        if int(asked) == 0:
            raise InputError("--per-node 0 starts nothing", hint="leave nodes out with --limit")
        return {node.name: int(asked) for node in cluster.nodes}
    if asked is not None and "=" in asked:
        return numbers_by_node("--per-node", asked, [node.name for node in cluster.nodes])
    if asked not in (None, GPU):
        raise InputError(
            f"--per-node {asked} is no number", hint="gpu, a number, or NODE=NUMBER for each: a=2,b=1"
        )
    gpus = {**_gpus_by_node(cluster), **counted}
    if asked == GPU:
        without = [node.name for node in cluster.nodes if not gpus.get(node.name)]
        if without:
            raise InputError(
                f"--per-node gpu: no GPU is known of {', '.join(without)}",
                hint="skyctl probe looks for them; or name `devices:` in cluster.yaml, or give a number",
            )
    return {node.name: gpus.get(node.name) or 1 for node in cluster.nodes}


def numbers_by_node(option: str, text: str, nodes: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    """``a=2,b=1`` as numbers, in the order of the nodes; only they may be named, and each must be."""
    given: dict[str, int] = {}
    for part in text.split(","):
        node, equals, number = part.strip().partition("=")
        if not equals or not number.isdecimal() or int(number) == 0:
            raise InputError(f"{option} {text}: {part!r} is not NODE=NUMBER", hint=f"as in {option} a=2,b=1")
        if node not in nodes:
            raise InputError(
                f"{option} names node {node!r}, which does not take part",
                hint=f"these do: {', '.join(nodes)}",
            )
        given[node] = int(number)
    if option == "--shares" and (missing := [node for node in nodes if node not in given]):
        raise InputError(f"--shares gives {', '.join(missing)} no samples", hint="leave a node out: --limit")
    return {node: given[node] for node in nodes if node in given}


def _gpus_by_node(cluster: Cluster) -> dict[str, int]:
    """By node, its accelerators: those that cluster.yaml names, else those that the newest probe found.

    A node is left out where neither tells.
    """
    from skyctl.files import newest_profile
    from skyctl.records.cluster import is_cpu

    profile = newest_profile(cluster.name)
    counts = {}
    for node in cluster.nodes:
        probed = [device.id for device in profile[1].devices if device.node == node.name] if profile else []
        if node.devices is not None:
            counts[node.name] = sum(not device.startswith("cpu") for device in node.devices)
        elif probed:
            counts[node.name] = sum(not is_cpu(device) for device in probed)
    return counts


def speeds_by_node(cluster: Cluster) -> dict[str, float] | None:
    """By node, how fast its fastest device is, as the newest probe found; None: not all are known."""
    from skyctl.files import newest_profile

    profile = newest_profile(cluster.name)
    if profile is None:
        return None
    speeds: dict[str, float] = {}
    for device in profile[1].devices:
        speed = device.flops_per_s / device.slowdown
        speeds[device.node] = max(speeds.get(device.node, 0.0), speed)
    if any(node.name not in speeds for node in cluster.nodes):
        return None
    return {node.name: speeds[node.name] for node in cluster.nodes}
