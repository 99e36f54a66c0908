"""The devices of a cluster that trials run on: how fast each is, and how a trial is kept to its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from skyctl.errors import InputError
from skyctl.files import newest_profile
from skyctl.records.cluster import Cluster, Node, device_id, device_kind, is_cpu, split_device_id
from skyctl.records.profile import Profile

VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
}
"""By kind of device, the variable that shows a process only one of them."""


@dataclass(frozen=True)
class TrialDevice:
    """A device that trials run on.

    Attributes:
        speed: in any unit; that of all devices is the same where they were not measured.
        environment: variables that keep a process to it.
    """

    id: str
    node: str
    speed: float
    environment: dict[str, str] = field(default_factory=dict)


def find_devices(cluster: Cluster) -> list[TrialDevice]:
    """By node, the devices that cluster.yaml names, else the accelerators that the newest probe found.

    A node of which neither tells any is one device, its processors.

    Raises:
        InputError: a trial can't be kept to one of several devices.
    """
    newest = newest_profile(cluster.name)
    profile = newest[1] if newest else None
    speeds = {} if profile is None else {d.id: d.flops_per_s / d.slowdown for d in profile.devices}
    ids = {node.name: _device_ids(node, profile) for node in cluster.nodes}
    known = [speeds[one] for of_node in ids.values() for one in of_node if one in speeds]
    usual = median(known) if known else 1.0
    return [
        TrialDevice(one, node, speeds.get(one, usual), _environment(one, of_node))
        for node, of_node in ids.items()
        for one in of_node
    ]


def _device_ids(node: Node, profile: Profile | None) -> list[str]:
    if node.devices is not None:
        return [device_id(node.name, device) for device in node.devices]
    probed = [device.id for device in profile.devices if device.node == node.name] if profile else []
    return [one for one in probed if not is_cpu(one)] or [device_id(node.name, "cpu")]


def _environment(device: str, of_node: Sequence[str]) -> dict[str, str]:
    kinds = Counter(map(device_kind, of_node))
    kind = device_kind(device)
    if kind == "cpu":
        return {variable: "" for other, variable in VISIBLE.items() if other in kinds}
    if kind in VISIBLE:
        return {VISIBLE[kind]: split_device_id(device)[1].partition(":")[2]}
    if kinds[kind] > 1:
        raise InputError(
            f"a trial can't be kept to {device}: of several {kind} devices a process sees all",
            hint="name one of them with `devices:` in cluster.yaml",
        )
    return {}
