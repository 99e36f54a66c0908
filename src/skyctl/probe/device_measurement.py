"""Starts a process for each device of a cluster, and has them all measured in the same seconds.

Each measures on until the last is done: on machines that devices share (a lab, local nodes) each is then
measured under the load that it will train under.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from skyctl.errors import SkyctlError
from skyctl.probe.device_probes import DeviceProbe, DeviceProbes, SessionLike
from skyctl.probe.layer_shapes import distinct_layers, layer_kinds
from skyctl.probe.node.probe_order import ProbeOrder
from skyctl.probe.node.probe_requests import CountRequest, MeasureRequest, StopMeasuringRequest
from skyctl.probe.probe_messages import LayerFlops, check_timings, layer_flops
from skyctl.probe.profile_cache import CachedTimings
from skyctl.probe.resource_shares import assign_threads, crowding
from skyctl.records.base import GIB
from skyctl.records.cluster import Cluster
from skyctl.records.profile import ShapeProfile
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.workload.workload_spec import WorkloadSpec

ProbeProgress = Callable[[str, str, float], None]
"""Called with a node's name (or ``links``, ``lines``, ``uplinks``), what it is at, what part is done.

For a node that has failed: why, and ``FAILED_SHARE``.
"""

FAILED_SHARE = -1.0
UNFINISHED_SHARE = 0.99
"""The largest share of a node that has not ended."""
MORE = 1.5
"""The measurements that count take so many budgets at most, or as long as the slowest device's first pass."""

OrderMaker = Callable[[str, "str | None"], ProbeOrder]
"""``probe_order`` of a cluster, by node and device; no device: the node's first."""


def probe_order(
    cluster: Cluster,
    specs: Mapping[str, WorkloadSpec],
    tls: TlsIdentity | None,
    name: str,
    device: str | None,
) -> ProbeOrder:
    """The order of a device's process.

    Args:
        specs: by node, the workload's description with the paths valid there.
        tls: the certificate with which messages are measured through TLS, or None.
    """
    node = cluster.node(name)
    return ProbeOrder(
        device=device,
        devices=node.devices,
        threads=node.threads,
        slowdown=node.slowdown,
        workload=specs.get(name),
        tls=tls,
    )


def start_processes(
    probes: DeviceProbes,
    cluster: Cluster,
    sessions: Mapping[str, Any],
    order_of: OrderMaker,
    on_progress: ProbeProgress,
) -> None:
    """Starts a process on every node that has a session, for its first device.

    Args:
        sessions: by node name, its session or the error there is instead.
    """
    for node in cluster.nodes:
        outcome = sessions.get(node.name)
        if isinstance(outcome, SkyctlError):
            probes.fail(node.name, outcome)
        elif outcome is None:
            probes.fail(node.name, "there is no connection to this node")
    for node in cluster.nodes:
        if node.name not in probes.failures:
            on_progress(node.name, "starting", 0.0)
            _start_process(probes, sessions, order_of, node.name, None)


def wait_until_ready(
    probes: DeviceProbes,
    sessions: Mapping[str, SessionLike],
    order_of: OrderMaker,
    start_s: float,
    on_progress: ProbeProgress,
) -> None:
    """Waits at most ``start_s`` until all are ready; starts one more for each further device of a node."""

    def started(member: DeviceProbe, event: dict[str, Any]) -> None:
        if event.get("event") == "facts":
            member.facts = event
            member.phase = "ready"
            on_progress(member.node.name, "ready", 0.0)

    probes.wait(probes.alive(), "facts", start_s, started)
    first = probes.alive()
    for member in first:
        for device in member.facts["devices"]:
            if device["id"] != member.facts["device"]:
                _start_process(probes, sessions, order_of, member.node.name, device["id"])
    further = [member for member in probes.alive() if member not in first]
    probes.wait(further, "facts", start_s, started)


def _start_process(
    probes: DeviceProbes,
    sessions: Mapping[str, SessionLike],
    order_of: OrderMaker,
    name: str,
    device: str | None,
) -> None:
    title = f"probe-{device or 'first'}".replace(":", "-")
    probes.start(sessions[name], order_of(name, device), name=title)


def measure_devices(
    probes: DeviceProbes,
    shapes: Sequence[ShapeProfile],
    budget_s: float,
    cap_s: float,
    on_progress: ProbeProgress,
    cached: CachedTimings,
) -> None:
    """Measures every device at once.

    The measurements that count run from when the last device has been through its layers, until the last
    one's layers have converged.

    Args:
        budget_s, cap_s: seconds that a device's first pass may take, and all of its measuring.
        cached: which layers need not be measured.
    """
    layers = distinct_layers(shapes)
    kinds = layer_kinds(shapes, layers)
    generic = bool(layers) and not any(layer.flops for shape in shapes for layer in shape.layers)
    heard = partial(_hear, on_progress, layer_flops(shapes))
    members = probes.alive()
    counts = assign_threads(members)
    for member in members:
        cap_gib = member.node.memory_gib
        request = MeasureRequest(
            budget_s=budget_s,
            cap_s=cap_s,
            layers=cached.to_measure(member.id, layers),
            kinds=kinds,
            threads=counts.get(id(member)),
            generic=generic or cached.generic(member.id),
            handling=cached.handles(member.id),
            gloo=cached.handles_gloo(member.id),
            memory_bytes=None if cap_gib is None else cap_gib * GIB,
            crowding=crowding(members, member),
            gradient_bytes=sum(layer.gradient_bytes for layer in shapes[0].layers) if shapes else 0.0,
            action_s=cached.actions.get(member.id),
        )
        probes.send(member, request)
    sent = time.monotonic()
    probes.wait(members, ("passed", "measured", "timings"), cap_s, heard)
    now = time.monotonic()
    count_s = max(MORE * budget_s, now - sent)
    for member in probes.alive():
        probes.send(member, CountRequest(count_s))
    left = [member for member in probes.alive() if not (member.done or member.measured)]
    probes.wait(left, ("measured", "timings"), cap_s, heard)
    for member in probes.alive():
        probes.send(member, StopMeasuringRequest())
    probes.wait([m for m in probes.alive() if not m.measured], "timings", cap_s, heard)


def _hear(on_progress: ProbeProgress, flops: LayerFlops, member: DeviceProbe, event: dict[str, Any]) -> None:
    """Notes what a device says while it is measured."""
    kind = event.get("event")
    if kind == "progress":
        member.phase = f"measuring {event['what']}"
        share = event["done"] / max(1, event["of"])
        on_progress(member.node.name, str(event["what"]), min(share, UNFINISHED_SHARE))
    elif kind == "passed":
        member.phase = "through the layers, waiting for the others"
    elif kind == "measured":
        member.phase, member.done = "measured, waiting for the others", True
        on_progress(member.node.name, "measured", 1.0)
    elif kind == "timings":
        check_timings(member.node, event["timings"], flops)
        member.measured = event
        member.phase = "measured"
