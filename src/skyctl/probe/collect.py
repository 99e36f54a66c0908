"""Measures a whole cluster: every device, every pair, and a workload's distinct layers → a ``Profile``.

All devices measure at the same time, and each goes on until the last is done: on machines they share (a lab,
local nodes) each is then measured under the load it will train under. Links come after, in quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from skyctl.errors import InputError, SkyctlError
from skyctl.probe.fleet import Fleet, Member, SessionLike
from skyctl.probe.lines import measure_lines
from skyctl.probe.links import How, default_how, measure_links
from skyctl.probe.memory import GIB, Seen, Usable, usable
from skyctl.probe.sites import named
from skyctl.probe.uplinks import measure_uplinks
from skyctl.probe.watching import OwnUse, conditions, threads
from skyctl.records.cluster import Cluster, device_id
from skyctl.records.profile import (
    Conditions,
    DeviceProfile,
    LayerCosts,
    LayerTiming,
    LineProfile,
    LinkProfile,
    NodeFailure,
    NodeProfile,
    Profile,
    ShapeProfile,
    SiteProfile,
    UplinkProfile,
    WorkloadProfile,
)
from skyctl.remote.addresses import interface_of, peer_address_outcomes

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload, WorkloadSpec

Progress = Callable[[str, str, float], None]
"""Called with a node's name (or ``links``, ``lines``, ``uplinks``), what it is at, what part is done.

A node that has failed: why, and ``FAILED``.
"""

FAILED = -1.0

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
    how_links: How | None = None,
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
    shapes = _shapes(workload, spec, microbatch_choices) if workload is not None and spec is not None else []
    try:
        specs: dict[str, Any] = {}
        if workload is not None and spec is not None:
            for node in cluster.nodes:  # random inputs: the data may lie on some nodes only
                given = (node_specs or {}).get(node.name) or workload.spec.to_dict()
                specs[node.name] = dict(given) | {"random_inputs": True}
        _start(fleet, cluster, sessions, specs, start_s, on_progress)
        _measure(fleet, shapes, budget_s, cap_s, on_progress)
        addresses = _addresses(fleet, sessions)
        links, sites = _links(fleet, addresses, cluster, how_links, on_progress)
        lines, uplinks = _lines(fleet, addresses, links, sites, on_progress)
        devices = _device_profiles(fleet, shapes, conditions(fleet.alive(), own_use))
        nodes = _node_profiles(fleet, sessions, addresses, sites)
    finally:
        fleet.close()
    return Profile(
        cluster=cluster.name,
        cluster_digest=cluster.digest,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        nodes=tuple(nodes),
        devices=tuple(d for node in cluster.nodes for d in devices if d.node == node.name),
        links=tuple(links),
        workload=_workload_profile(workload, spec, shapes)
        if workload is not None and spec is not None
        else None,
        failures=_failures(fleet, cluster),
        lines=tuple(line for line in lines if line.node not in fleet.failures),
        sites=tuple(sites),
        uplinks=tuple(uplinks),
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
    fleet: Fleet, shapes: Sequence[ShapeProfile], budget_s: float, cap_s: float, on_progress: Progress
) -> None:
    """Every device at once; the order to stop goes out when the last has measured everything."""
    layers = _distinct(shapes)
    kinds = _kinds(shapes, layers)
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
    counts = threads(members)
    for member in members:
        cap_gib = member.node.memory_gib
        order = {"op": "measure", "layers": layers, "kinds": kinds, "generic": generic}
        order |= {"budget_s": budget_s, "cap_s": cap_s, "threads": counts.get(id(member))}
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


def _links(
    fleet: Fleet, addresses: Mapping[str, str], cluster: Cluster, how: How | None, on_progress: Progress
) -> tuple[list[LinkProfile], list[SiteProfile]]:
    """The links between the nodes that are left, and their sites."""
    how = how or default_how(len(addresses))
    links, found = measure_links(fleet, addresses, _rounds("links", on_progress), how)
    on_progress("links", "not measured" if how == "none" else "measured", 1.0)
    gone = set(fleet.failures)
    left = ([name for name in site if name not in gone] for site in found)
    sites = named([site for site in left if site], cluster.groups)
    return [link for link in links if not {link.source, link.target} & gone], sites


def _lines(
    fleet: Fleet,
    addresses: Mapping[str, str],
    links: Sequence[LinkProfile],
    sites: Sequence[SiteProfile],
    on_progress: Progress,
) -> tuple[list[LineProfile], list[UplinkProfile]]:
    """The nodes' own lines, and the sites'. What is on one machine, by loopback, has no line in between."""
    apart = {name: address for name, address in addresses.items() if not ip_address(address).is_loopback}
    lines, reasons = measure_lines(fleet, apart, links, _rounds("lines", on_progress))
    uplinks, others = measure_uplinks(fleet, apart, links, sites, _rounds("uplinks", on_progress))
    for name, reason in (*reasons.items(), *others.items()):
        on_progress("lines", f"{name} left out: {reason}", 0.0)
    return lines, uplinks


def _rounds(what: str, on_progress: Progress) -> Callable[[int, int], None]:
    return lambda done, of: on_progress(what, f"round {done + 1} of {of}", done / max(1, of))


def _shapes(workload: Workload, spec: WorkloadSpec, choices: Sequence[int]) -> list[ShapeProfile]:
    """The workload's layers at the larger microbatch size of each choice."""
    from skyctl.workload.costs import costs
    from skyctl.workload.split import sizes

    by_size: dict[int, tuple[LayerCosts, ...]] = {}
    shapes = []
    for microbatches in sorted(set(choices)):
        size = sizes(spec.batch_size, microbatches)[0]
        if size not in by_size:
            by_size[size] = tuple(
                LayerCosts(
                    name=cost.name,
                    signature=cost.signature,
                    flops=float(cost.flops),
                    state_bytes=float(cost.state_bytes),
                    activation_bytes=float(cost.activation_bytes),
                    output_bytes=float(cost.output_bytes),
                    workspace_bytes=float(cost.workspace_bytes),
                    deferred_bytes=float(cost.deferred_bytes),
                )
                for cost in costs(workload, size)
            )
        shapes.append(ShapeProfile(microbatch_size=size, microbatches=microbatches, layers=by_size[size]))
    return shapes


def _distinct(shapes: Sequence[ShapeProfile]) -> list[dict[str, Any]]:
    """The first layer of each kind, in order, with its signature and needs by microbatch size."""
    found: dict[int, dict[str, Any]] = {}
    seen: set[tuple[int, str]] = set()
    for shape in shapes:
        size = shape.microbatch_size
        for index, layer in enumerate(shape.layers):
            if (size, layer.signature) in seen:
                continue
            seen.add((size, layer.signature))
            empty = {"index": index, "name": layer.name, "flops": 0.0, "signatures": {}, "needs_bytes": {}}
            entry = found.setdefault(index, empty)
            entry["flops"] += layer.flops
            entry["signatures"][str(size)] = layer.signature
            entry["needs_bytes"][str(size)] = (
                layer.state_bytes + layer.activation_bytes + layer.workspace_bytes + 2 * layer.output_bytes
            )
    return [found[index] for index in sorted(found)]


def _kinds(shapes: Sequence[ShapeProfile], layers: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """By microbatch size: which of the distinct layers each layer of the model is like."""
    found = {}
    for shape in shapes:
        size = str(shape.microbatch_size)
        numbers = {row["signatures"][size]: n for n, row in enumerate(layers) if size in row["signatures"]}
        found[size] = [numbers[layer.signature] for layer in shape.layers]
    return found


def _device_profiles(
    fleet: Fleet, shapes: Sequence[ShapeProfile], seen: Mapping[str, Conditions]
) -> list[DeviceProfile]:
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
        profile = _device_profile(name, member, shares[name], flops_per_s, timings)
        found.append(profile.model_copy(update={"conditions": seen.get(name)}))
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
    fleet: Fleet, sessions: Mapping[str, Any], addresses: Mapping[str, str], sites: Sequence[SiteProfile]
) -> list[NodeProfile]:
    site_of = {name: site.name for site in sites for name in site.nodes}
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
            numa_nodes=facts.get("numa_nodes"),
            site=site_of.get(name),
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
