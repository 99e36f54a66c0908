"""Measures a whole cluster: every device, every pair, and a workload's distinct layers → a ``Profile``.

All devices measure at the same time, and each goes on until the last is done: on machines they share (a lab,
local nodes) each is then measured under the load it will train under. Links come after, in quiet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyctl.errors import InputError, SkyctlError
from skyctl.probe.earlier import Known, costliest, known_links, known_timings, now_iso
from skyctl.probe.fleet import Fleet, Member, SessionLike
from skyctl.probe.found import device_profiles, node_profiles
from skyctl.probe.links import How
from skyctl.probe.network import Network, addresses_of, measure_network, rounds_of
from skyctl.probe.ring import measure_ring
from skyctl.probe.shapes import distinct, kinds_of, shapes_of
from skyctl.probe.watching import OwnUse, conditions, threads
from skyctl.records.base import GIB
from skyctl.records.cluster import Cluster, device_id
from skyctl.records.profile import (
    LinkProfile,
    NodeFailure,
    Profile,
    ShapeProfile,
    WorkloadProfile,
)
from skyctl.remote.credentials import certificate

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload, WorkloadSpec

Progress = Callable[[str, str, float], None]
"""Called with a node's name (or ``links``, ``lines``, ``uplinks``), what it is at, what part is done.

A node that has failed: why, and ``FAILED``.
"""

FAILED = -1.0


@dataclass(frozen=True)
class Recheck:
    """``then``: the profile to look at again; ``holds``: whether a link is still as it was."""

    then: Profile
    holds: Callable[[LinkProfile], bool]


START_S = 180.0
BUDGET_S = 4.0
MORE, LONGER, OF_START = 1.5, 0.3, 0.2
"""Times the budget, or such a part of the slowest device's first pass, or of all the time since the start: so
long at most is measured what counts. Slow devices repeat less often, and to start takes them longest."""
CAP_S = 180.0


def probe(
    cluster: Cluster,
    sessions: Mapping[str, Any],
    workload: Workload | None = None,
    spec: WorkloadSpec | None = None,
    microbatch_choices: Sequence[int] = (),
    on_progress: Progress = lambda _node, _what, _done: None,
    *,
    node_specs: Mapping[str, Mapping[str, Any]] | None = None,
    budget_s: float = BUDGET_S,
    start_s: float = START_S,
    cap_s: float = CAP_S,
    how_links: How | None = None,
    earlier: Sequence[Profile] = (),
    recheck: Recheck | None = None,
    encrypt: bool = False,
) -> Profile:
    """The cluster as it is now. A node that can't be measured is in ``failures`` and hides no other.

    Args:
        sessions: by node name, its session or the error there is instead.
        workload, spec: None: each device's generic speed is measured, with no layer times.
        microbatch_choices: numbers of microbatches a step that may be planned with.
        node_specs: by node, the workload's description with the paths valid there (default: as here).
        budget_s: about how long the first pass over the layers may take.
        start_s, cap_s: deadlines for a node to be ready, and for its measurement.
        how_links: which links are measured (None: ``default_how``).
        earlier: the cluster's profiles, newest first; what of them still holds is not measured again.
        recheck: a profile to look at again; only its costliest layers and a ring of links are measured.
        encrypt: messages and links are measured through TLS, as training will send them.

    Raises:
        InputError: a workload without its spec or without a number of microbatches.
        WorkloadError: more microbatches than samples.
    """
    if workload is not None and (spec is None or not microbatch_choices):
        raise InputError("probing a workload needs its description and at least one number of microbatches")
    fleet = Fleet(lambda name, failure: on_progress(name, failure.error, FAILED))
    own_use = OwnUse()
    for node in cluster.nodes:
        outcome = sessions.get(node.name)
        if isinstance(outcome, SkyctlError):
            fleet.fail(node.name, outcome)
        elif outcome is None:
            fleet.fail(node.name, "there is no connection to this node")
    shapes: list[ShapeProfile] = []
    try:
        specs: dict[str, Any] = {}
        if workload is not None and spec is not None:
            for node in cluster.nodes:  # random inputs: the data may lie on some nodes only
                given = (node_specs or {}).get(node.name) or workload.spec.to_dict()
                specs[node.name] = dict(given) | {"random_inputs": True}
        tls = certificate() if encrypt else None
        ready = _start(fleet, cluster, sessions, specs, tls, start_s, on_progress)
        if workload is not None and spec is not None:  # while the nodes import torch
            shapes = shapes_of(workload, spec, microbatch_choices)
        ready()
        created = now_iso()
        if recheck is None:
            known = known_timings(fleet.alive(), earlier, shapes, spec.dtype if spec else "", created)
        else:
            size = shapes[0].microbatch_size if shapes else 0
            known = costliest(recheck.then, size, fleet.alive())
        _measure(fleet, shapes, budget_s, cap_s, on_progress, known)
        known.complete(fleet.alive())
        addresses = addresses_of(fleet, sessions)
        taken = known_links(earlier, known, addresses, created)
        if recheck is not None:
            network = Network(measure_ring(fleet, addresses, recheck.holds, rounds_of("links", on_progress)))
        elif taken is None or how_links is not None:
            network = measure_network(fleet, cluster, addresses, how_links, on_progress)
        else:
            network = Network(taken.links, taken.sites, taken.lines, taken.uplinks)
        seen = conditions(fleet.alive(), own_use)
        found = device_profiles(fleet, shapes, seen, known.speeds)
        devices = [known.dated(device, created) for device in found]
        nodes = node_profiles(fleet, sessions, addresses, network.sites)
    finally:
        fleet.close()
    return Profile(
        cluster=cluster.name,
        cluster_digest=cluster.digest,
        created=created,
        nodes=tuple(nodes),
        devices=tuple(d for node in cluster.nodes for d in devices if d.node == node.name),
        links=tuple(network.links),
        workload=_workload_profile(workload, spec, shapes)
        if workload is not None and spec is not None
        else None,
        failures=_failures(fleet, cluster),
        lines=tuple(line for line in network.lines if line.node not in fleet.failures),
        sites=tuple(network.sites),
        uplinks=tuple(network.uplinks),
        encrypted=encrypt,
    )


def _start(
    fleet: Fleet,
    cluster: Cluster,
    sessions: Mapping[str, SessionLike],
    specs: Mapping[str, Any],
    tls: Mapping[str, str] | None,
    start_s: float,
    on_progress: Progress,
) -> Callable[[], None]:
    """Starts a process on every node.

    Returns:
        What waits until they are ready, with one more for each further device.
    """

    def started(member: Member, event: dict[str, Any]) -> None:
        if event.get("event") == "facts":
            member.facts = event
            member.phase = "ready"
            on_progress(member.node.name, "ready", 0.0)

    def start(name: str, device: str | None) -> None:
        node = cluster.node(name)
        payload = {
            "device": device,
            "devices": None if node.devices is None else list(node.devices),
            "threads": node.threads,
            "slowdown": node.slowdown,
            "workload": specs.get(name),
            "tls": tls,
        }
        fleet.start(sessions[name], payload, name=f"probe-{device or 'first'}".replace(":", "-"))

    for node in cluster.nodes:
        if node.name not in fleet.failures:
            on_progress(node.name, "starting", 0.0)
            start(node.name, None)

    def ready() -> None:
        fleet.wait(fleet.alive(), "facts", start_s, started)
        first = fleet.alive()
        for member in first:
            for device in member.facts["devices"]:
                if device["id"] != member.facts["device"]:
                    start(member.node.name, device["id"])
        further = [member for member in fleet.alive() if member not in first]
        fleet.wait(further, "facts", start_s, started)

    return ready


def _measure(
    fleet: Fleet,
    shapes: Sequence[ShapeProfile],
    budget_s: float,
    cap_s: float,
    on_progress: Progress,
    known: Known,
) -> None:
    """Every device at once, once all are warm.

    What counts is measured from when the last has been through its layers, until the last has measured all.
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


def _workload_profile(
    workload: Workload, spec: WorkloadSpec, shapes: Sequence[ShapeProfile]
) -> WorkloadProfile:
    return WorkloadProfile(
        source=spec.source,
        digest=workload.digest,
        batch_size=spec.batch_size,
        dtype=spec.dtype,
        shapes=tuple(shapes),
    )


def _failures(fleet: Fleet, cluster: Cluster) -> tuple[NodeFailure, ...]:
    return tuple(fleet.failures[node.name] for node in cluster.nodes if node.name in fleet.failures)
