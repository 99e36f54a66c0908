"""The records of devices and nodes, made from what the probe's processes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyctl import __version__
from skyctl.probe.device_probes import DeviceProbe, DeviceProbes
from skyctl.probe.resource_shares import SeenMemory, UsableMemory, divide_memory
from skyctl.records.base import GIB
from skyctl.records.profile import (
    Conditions,
    DeviceProfile,
    LayerTiming,
    MessageCosts,
    NodeProfile,
    ShapeProfile,
    SiteProfile,
)
from skyctl.remote.peer_addresses import interface_with_address


def device_profiles(
    probes: DeviceProbes,
    shapes: Sequence[ShapeProfile],
    seen: Mapping[str, Conditions],
    speeds: Mapping[str, float] | None = None,
) -> list[DeviceProfile]:
    """Every device as measured; one that could run no layer is its node's failure.

    Args:
        speeds: by device, FLOP/s known from before, for those that were not to measure enough to tell.
    """
    members = {m.id: m for m in probes.alive()}
    shares = divide_memory({name: _seen_memory(member) for name, member in members.items()})
    profiles = []
    for name, member in members.items():
        timings = tuple(LayerTiming(**row) for row in member.measured["timings"])
        flops_per_s = (
            member.measured["flops_per_s"] or _model_flops_per_s(timings, shapes) or (speeds or {}).get(name)
        )
        if flops_per_s is None:
            reason = next((t.skipped for t in timings if t.skipped), "nothing was measured")
            probes.fail(member.node.name, f"no layer of the workload could be run on {name}: {reason}")
            continue
        profile = _device_profile(name, member, shares[name], flops_per_s, timings)
        profiles.append(profile.model_copy(update={"conditions": seen.get(name)}))
    return [device for device in profiles if device.node not in probes.failures]


def _device_profile(
    name: str, member: DeviceProbe, share: UsableMemory, flops_per_s: float, timings: tuple[LayerTiming, ...]
) -> DeviceProfile:
    local, gloo = member.local, member.measured.get("gloo")
    listed = {device["id"]: device["name"] for device in member.facts["devices"]}
    return DeviceProfile(
        id=name,
        node=member.node.name,
        name=str(listed.get(local, local)),
        threads=int(member.measured["threads"]) if member.on_cpu else None,
        slowdown=member.node.slowdown,
        memory_bytes=float(share.memory_bytes),
        memory_from=share.memory_from,
        reserved_bytes=float(member.measured["reserved_bytes"]),
        flops_per_s=float(flops_per_s),
        timings=timings,
        handling_s=float(member.measured.get("handling_s", 0.0)),
        handling_byte_s=float(member.measured.get("handling_byte_s", 0.0)),
        action_s=float(member.measured.get("action_s", 0.0)),
        step_s=float(member.measured.get("step_s", 0.0)),
        reduce_byte_s=float(member.measured.get("reduce_byte_s", 0.0)),
        message_byte_s=float(member.measured.get("message_byte_s", 0.0)),
        gloo=None if gloo is None else MessageCosts.model_validate(gloo),
    )


def _seen_memory(member: DeviceProbe) -> SeenMemory:
    cap_gib = member.node.memory_gib
    return SeenMemory(
        memory_bytes=float(member.measured["memory_bytes"]),
        memory_from=str(member.measured["memory_from"]),
        pot=member.measured["memory_scope"],
        own_bytes=float(member.measured["own_bytes"]),
        cap_bytes=None if cap_gib is None else cap_gib * GIB,
    )


def _model_flops_per_s(timings: Sequence[LayerTiming], shapes: Sequence[ShapeProfile]) -> float | None:
    """Σ flops / Σ seconds over the whole model's layers that were measured, at every size."""
    seconds = {
        (t.signature, t.microbatch_size): t.forward_s + t.backward_s
        for t in timings
        if t.forward_s is not None and t.backward_s is not None
    }
    flops, total_s = 0.0, 0.0
    for shape in shapes:
        for layer in shape.layers:
            layer_s = seconds.get((layer.signature, shape.microbatch_size))
            if layer_s is not None:
                flops += layer.flops
                total_s += layer_s
    return flops / total_s if flops > 0 and total_s > 0 else None


def node_profiles(
    probes: DeviceProbes,
    sessions: Mapping[str, Any],
    addresses: Mapping[str, str],
    sites: Sequence[SiteProfile],
) -> list[NodeProfile]:
    """The profile of every node that has not failed."""
    site_of = {name: site.name for site in sites for name in site.nodes}
    profiles = []
    for name, member in probes.first_of_nodes().items():
        facts, address = member.facts, addresses.get(name)
        profile = NodeProfile(
            name=name,
            hostname=str(facts["hostname"]),
            platform=str(facts["platform"]),
            python=str(facts["python"]),
            torch=str(facts["torch"]),
            cpu_model=str(facts["cpu_model"]),
            cpus=float(facts["cpus"]),
            memory_total_bytes=float(facts["memory_total_bytes"]),
            memory_available_bytes=float(facts["memory_available_bytes"]),
            address=address,
            interface=None if address is None else interface_with_address(sessions[name], address),
            numa_nodes=facts.get("numa_nodes"),
            max_cpu_isa=facts.get("max_cpu_isa"),
            quota_period_s=facts.get("quota_period_s") or None,
            site=site_of.get(name),
            skyctl=__version__,
        )
        profiles.append(profile)
    return profiles
