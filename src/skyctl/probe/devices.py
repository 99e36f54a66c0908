"""The devices of a cluster in step: a process each, started, and all measured in the same seconds.

Each goes on until the last is done: on machines they share (a lab, local nodes) each is then measured under
the load it will train under.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyctl.probe.earlier import Known
from skyctl.probe.fleet import Fleet, Member, SessionLike
from skyctl.probe.shapes import distinct, kinds_of
from skyctl.probe.watching import threads
from skyctl.records.base import GIB
from skyctl.records.cluster import Cluster, device_id
from skyctl.records.profile import ShapeProfile

Progress = Callable[[str, str, float], None]
"""Called with a node's name (or ``links``, ``lines``, ``uplinks``), what it is at, what part is done.

A node that has failed: why, and ``FAILED``.
"""

FAILED = -1.0
MORE, LONGER, OF_START = 1.5, 0.3, 0.2
"""Times the budget, or such a part of the slowest device's first pass, or of all the time since the start: so
long at most is measured what counts. Slow devices repeat less often, and to start takes them longest."""

Payload = Callable[[str, "str | None"], dict[str, Any]]
"""What the process of that node and device is told as it starts; no device: the node's first."""


def payload_of(
    cluster: Cluster,
    specs: Mapping[str, Any],
    tls: Mapping[str, str] | None,
    name: str,
    device: str | None,
) -> dict[str, Any]:
    """A ``Payload``.

    Args:
        specs: by node, the workload's description with the paths valid there.
        tls: the certificate with which messages are measured through TLS, or None.
    """
    node = cluster.node(name)
    return {
        "device": device,
        "devices": None if node.devices is None else list(node.devices),
        "threads": node.threads,
        "slowdown": node.slowdown,
        "workload": specs.get(name),
        "tls": tls,
    }


def start(
    fleet: Fleet,
    cluster: Cluster,
    sessions: Mapping[str, SessionLike],
    payload: Payload,
    on_progress: Progress,
) -> None:
    """Starts a process on every node that has not failed, for its first device."""
    for node in cluster.nodes:
        if node.name not in fleet.failures:
            on_progress(node.name, "starting", 0.0)
            _start(fleet, sessions, payload, node.name, None)


def ready(
    fleet: Fleet,
    sessions: Mapping[str, SessionLike],
    payload: Payload,
    start_s: float,
    on_progress: Progress,
) -> None:
    """Waits until they are ready, at most so long, with one more for each further device."""

    def started(member: Member, event: dict[str, Any]) -> None:
        if event.get("event") == "facts":
            member.facts = event
            member.phase = "ready"
            on_progress(member.node.name, "ready", 0.0)

    fleet.wait(fleet.alive(), "facts", start_s, started)
    first = fleet.alive()
    for member in first:
        for device in member.facts["devices"]:
            if device["id"] != member.facts["device"]:
                _start(fleet, sessions, payload, member.node.name, device["id"])
    further = [member for member in fleet.alive() if member not in first]
    fleet.wait(further, "facts", start_s, started)


def _start(
    fleet: Fleet, sessions: Mapping[str, SessionLike], payload: Payload, name: str, device: str | None
) -> None:
    title = f"probe-{device or 'first'}".replace(":", "-")
    fleet.start(sessions[name], payload(name, device), name=title)


def measure(
    fleet: Fleet,
    shapes: Sequence[ShapeProfile],
    budget_s: float,
    cap_s: float,
    on_progress: Progress,
    known: Known,
) -> None:
    """Every device at once, once all are warm.

    What counts is measured from when the last has been through its layers, until the last has measured all.

    Args:
        budget_s, cap_s: seconds that a device's first pass may take, and all of its measuring.
        known: which layers need not be measured.
    """
    layers = distinct(shapes)
    kinds = kinds_of(shapes, layers)
    generic = bool(layers) and not any(layer["flops"] for layer in layers)

    def heard(member: Member, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "progress":
            member.phase = f"measuring {event['what']}"
            on_progress(member.node.name, str(event["what"]), event["done"] / max(1, event["of"]))
        elif kind == "passed":
            member.phase = "through the layers, waiting for the others"
        elif kind == "measured":
            member.phase, member.done = "measured, waiting for the others", True
            on_progress(member.node.name, "measured", 1.0)
        elif kind == "timings":
            member.measured = event
            member.phase = "measured"

    members = fleet.alive()
    cold = [m for m in members if layers and known.measures(device_id(m.node.name, m.local))]
    for member in cold:
        member.phase = "warming up"
        on_progress(member.node.name, member.phase, 0.0)
        fleet.send(member, {"op": "warm"})
    fleet.wait(cold, "warm", cap_s, heard)
    members = fleet.alive()
    counts = threads(members)
    for member in members:
        cap_gib = member.node.memory_gib
        name = device_id(member.node.name, member.local)
        order: dict[str, Any] = {"op": "measure", "layers": known.order(name, layers), "kinds": kinds}
        order |= {"budget_s": budget_s, "cap_s": cap_s, "threads": counts.get(id(member))}
        order |= {"generic": generic or known.generic(name), "handling": known.handles(name)}
        if name in known.actions:
            order["action_s"] = known.actions[name]
        fleet.send(member, order | {"memory_bytes": None if cap_gib is None else cap_gib * GIB})
    sent = time.monotonic()
    fleet.wait(members, ("passed", "measured", "timings"), cap_s, heard)
    now = time.monotonic()
    count_s = max(MORE * budget_s, LONGER * (now - sent), OF_START * (now - fleet.began))
    for member in fleet.alive():
        fleet.send(member, {"op": "count", "seconds": count_s})
    left = [member for member in fleet.alive() if not (member.done or member.measured)]
    fleet.wait(left, ("measured", "timings"), cap_s, heard)
    for member in fleet.alive():
        fleet.send(member, {"op": "stop"})
    fleet.wait([m for m in fleet.alive() if not m.measured], "timings", cap_s, heard)
