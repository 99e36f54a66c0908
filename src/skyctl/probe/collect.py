"""Measures a whole cluster: every device, every pair, and a workload's distinct layers → a ``Profile``.

All devices measure at the same time, and each goes on until the last is done: on machines they share (a lab,
local nodes) each is then measured under the load it will train under. Links come after, in quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from skyctl import __version__
from skyctl.errors import InputError, SkyctlError
from skyctl.probe.earlier import Known, costliest, known_links, known_timings, now_iso
from skyctl.probe.fleet import Fleet, Member, SessionLike
from skyctl.probe.lines import measure_lines
from skyctl.probe.links import measure_links
from skyctl.probe.memory import GIB, Seen, Usable, usable
from skyctl.probe.ring import measure_ring
from skyctl.probe.shapes import distinct, kinds_of, shapes_of
from skyctl.records.cluster import Cluster, device_id
from skyctl.records.profile import (
    DeviceProfile,
    LayerTiming,
    LineProfile,
    LinkProfile,
    NodeFailure,
    NodeProfile,
    Profile,
    ShapeProfile,
    WorkloadProfile,
)
from skyctl.remote.addresses import interface_of, peer_address_outcomes

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload, WorkloadSpec

Progress = Callable[[str, str, float], None]
"""Called with a node's name (or ``links``, ``lines``), what it is at, and how much is done (0 to 1)."""


@dataclass(frozen=True)
class Recheck:
    """``then``: the profile to look at again; ``holds``: whether a link is still as it was."""

    then: Profile
    holds: Callable[[LinkProfile], bool]


START_S = 180.0
BUDGET_S = 4.0
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
    earlier: Sequence[Profile] = (),
    recheck: Recheck | None = None,
) -> Profile:
    """The cluster as it is now. A node that can't be measured is in ``failures`` and hides no other.

    Args:
        sessions: by node name, its session or the error there is instead.
        workload, spec: None: each device's generic speed is measured, with no layer times.
        microbatch_choices: numbers of microbatches a step that may be planned with.
        node_specs: by node, the workload's description with the paths valid there (default: as here).
        budget_s: about how long the first pass over the layers may take.
        start_s, cap_s: deadlines for a node to be ready, and for its measurement.
        earlier: the cluster's profiles, newest first; what of them still holds is not measured again.
        recheck: a profile to look at again; only its costliest layers and a ring of links are measured.

    Raises:
        InputError: a workload without its spec or without a number of microbatches.
        WorkloadError: more microbatches than samples.
    """
    if workload is not None and (spec is None or not microbatch_choices):
        raise InputError("probing a workload needs its description and at least one number of microbatches")
    fleet = Fleet()
    for node in cluster.nodes:
        outcome = sessions.get(node.name)
        if isinstance(outcome, SkyctlError):
            fleet.fail(node.name, outcome)
        elif outcome is None:
            fleet.fail(node.name, "there is no connection to this node")
    shapes = (
        shapes_of(workload, spec, microbatch_choices) if workload is not None and spec is not None else []
    )
    try:
        specs: dict[str, Any] = {}
        if workload is not None and spec is not None:
            for node in cluster.nodes:  # random inputs: the data may lie on some nodes only
                given = (node_specs or {}).get(node.name) or workload.spec.to_dict()
                specs[node.name] = dict(given) | {"random_inputs": True}
        _start(fleet, cluster, sessions, specs, start_s, on_progress)
        created = now_iso()
        if recheck is None:
            known = known_timings(fleet.alive(), earlier, shapes, spec.dtype if spec else "", created)
        else:
            size = shapes[0].microbatch_size if shapes else 0
            known = costliest(recheck.then, size, fleet.alive())
        _measure(fleet, shapes, budget_s, cap_s, on_progress, known)
        known.complete(fleet.alive())
        addresses = _addresses(fleet, sessions)
        taken = known_links(earlier, known, addresses, created)
        if recheck is not None:
            links = measure_ring(fleet, addresses, recheck.holds, _rounds("links", on_progress))
            lines: list[LineProfile] = []
        elif taken is None:
            links = _links(fleet, addresses, on_progress)
            lines = _lines(fleet, addresses, links, on_progress)
        else:
            links, lines = list(taken.links), list(taken.lines)
        devices = [known.dated(device, created) for device in _device_profiles(fleet, shapes)]
        nodes = _node_profiles(fleet, sessions, addresses)
    finally:
        fleet.close()
    return Profile(
        cluster=cluster.name,
        cluster_digest=cluster.digest,
        created=created,
        nodes=tuple(nodes),
        devices=tuple(d for node in cluster.nodes for d in devices if d.node == node.name),
        links=tuple(links),
        workload=_workload_profile(workload, spec, shapes)
        if workload is not None and spec is not None
        else None,
        failures=_failures(fleet, cluster),
        lines=tuple(line for line in lines if line.node not in fleet.failures),
        sites=taken.sites if taken is not None else (),
        uplinks=taken.uplinks if taken is not None else (),
    )


def _start(
    fleet: Fleet,
    cluster: Cluster,
    sessions: Mapping[str, SessionLike],
    specs: Mapping[str, Any],
    start_s: float,
    on_progress: Progress,
) -> None:
    """A process on every node, then one more for each further device."""

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
        }
        fleet.start(sessions[name], payload, name=f"probe-{device or 'first'}".replace(":", "-"))

    for node in cluster.nodes:
        if node.name not in fleet.failures:
            on_progress(node.name, "starting", 0.0)
            start(node.name, None)
    fleet.wait(fleet.alive(), "facts", start_s, started)
    first = fleet.alive()
    for member in first:
        for device in member.facts["devices"]:
            if device["id"] != member.facts["device"]:
                start(member.node.name, device["id"])
    further = [member for member in fleet.alive() if member not in first]
    fleet.wait(further, "facts", start_s, started)


def _measure(
    fleet: Fleet,
    shapes: Sequence[ShapeProfile],
    budget_s: float,
    cap_s: float,
    on_progress: Progress,
    known: Known,
) -> None:
    """Every device at once; the order to stop goes out when the last has measured everything."""
    layers = distinct(shapes)
    kinds = kinds_of(shapes, layers)
    generic = bool(layers) and not any(layer["flops"] for layer in layers)

    def heard(member: Member, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "progress":
            member.phase = f"measuring {event['what']}"
            on_progress(member.node.name, str(event["what"]), event["done"] / max(1, event["of"]))
        elif kind == "measured":
            member.phase = "measured, waiting for the others"
            on_progress(member.node.name, "measured", 1.0)
        elif kind == "timings":
            member.measured = event
            member.phase = "measured"

    members = fleet.alive()
    for member in members:
        cap_gib = member.node.memory_gib
        order = {"op": "measure", "layers": layers, "kinds": kinds, "generic": generic}
        order |= {"budget_s": budget_s, "cap_s": cap_s}
        name = device_id(member.node.name, member.local)
        order |= {"layers": known.order(name, layers), "handling": known.handles(name)}
        fleet.send(member, order | {"memory_bytes": None if cap_gib is None else cap_gib * GIB})
    fleet.wait(members, ("measured", "timings"), cap_s, heard)
    for member in fleet.alive():
        fleet.send(member, {"op": "stop"})
    fleet.wait([m for m in fleet.alive() if not m.measured], "timings", cap_s, heard)


def _addresses(fleet: Fleet, sessions: Mapping[str, Any]) -> dict[str, str]:
    """By node, the address its peers use."""
    alive = {m.node.name: sessions[m.node.name] for m in fleet.alive()}
    addresses: dict[str, str] = {}
    for name, outcome in peer_address_outcomes(alive).items():
        if isinstance(outcome, SkyctlError):
            fleet.fail(name, outcome)
        else:
            addresses[name] = outcome
    return addresses


def _links(fleet: Fleet, addresses: Mapping[str, str], on_progress: Progress) -> list[LinkProfile]:
    """The links between the nodes that are left."""

    links = measure_links(fleet, addresses, _rounds("links", on_progress))
    on_progress("links", "measured", 1.0)
    return [link for link in links if not {link.source, link.target} & set(fleet.failures)]


def _lines(
    fleet: Fleet, addresses: Mapping[str, str], links: Sequence[LinkProfile], on_progress: Progress
) -> list[LineProfile]:
    """The nodes' own lines. What is on one machine, by loopback, has no line in between."""

    apart = {name: address for name, address in addresses.items() if not ip_address(address).is_loopback}
    lines, reasons = measure_lines(fleet, apart, links, _rounds("lines", on_progress))
    for name, reason in reasons.items():
        on_progress("lines", f"{name} left out: {reason}", 0.0)
    return lines


def _rounds(what: str, on_progress: Progress) -> Callable[[int, int], None]:
    return lambda done, of: on_progress(what, f"round {done + 1} of {of}", done / max(1, of))


def _device_profiles(fleet: Fleet, shapes: Sequence[ShapeProfile]) -> list[DeviceProfile]:
    members = {device_id(m.node.name, m.local): m for m in fleet.alive()}
    shares = usable({name: _seen(member) for name, member in members.items()})
    found = []
    for name, member in members.items():
        timings = tuple(LayerTiming(**row) for row in member.measured["timings"])
        flops_per_s = member.measured["flops_per_s"] or _speed(timings, shapes)
        if flops_per_s is None:
            reason = next((t.skipped for t in timings if t.skipped), "nothing was measured")
            fleet.fail(member.node.name, f"no layer of the workload could be run on {name}: {reason}")
            continue
        found.append(_device_profile(name, member, shares[name], flops_per_s, timings))
    return [device for device in found if device.node not in fleet.failures]


def _device_profile(
    name: str, member: Member, share: Usable, flops_per_s: float, timings: tuple[LayerTiming, ...]
) -> DeviceProfile:
    local = member.local
    listed = {device["id"]: device["name"] for device in member.facts["devices"]}
    return DeviceProfile(
        id=name,
        node=member.node.name,
        name=str(listed.get(local, local)),
        threads=int(member.measured["threads"]) if local.startswith("cpu") else None,
        slowdown=member.node.slowdown,
        memory_bytes=float(share.memory_bytes),
        memory_from=share.memory_from,
        reserved_bytes=float(member.measured["reserved_bytes"]),
        flops_per_s=float(flops_per_s),
        timings=timings,
        handling_s=float(member.measured.get("handling_s", 0.0)),
        handling_byte_s=float(member.measured.get("handling_byte_s", 0.0)),
    )


def _seen(member: Member) -> Seen:
    cap_gib = member.node.memory_gib
    return Seen(
        memory_bytes=float(member.measured["memory_bytes"]),
        memory_from=str(member.measured["memory_from"]),
        pot=member.measured["memory_scope"],
        own_bytes=float(member.measured["own_bytes"]),
        cap_bytes=None if cap_gib is None else cap_gib * GIB,
    )


def _speed(timings: Sequence[LayerTiming], shapes: Sequence[ShapeProfile]) -> float | None:
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


def _node_profiles(
    fleet: Fleet, sessions: Mapping[str, Any], addresses: Mapping[str, str]
) -> list[NodeProfile]:
    found: dict[str, NodeProfile] = {}
    for member in fleet.alive():
        name, facts = member.node.name, member.facts
        if name in found:
            continue
        address = addresses.get(name)
        found[name] = NodeProfile(
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
            interface=None if address is None else interface_of(sessions[name], address),
            skyctl=__version__,
        )
    return list(found.values())


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
