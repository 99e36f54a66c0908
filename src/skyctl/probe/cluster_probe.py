"""Measures a whole cluster: every device, every pair, and a workload's distinct layers → a ``Profile``.

First the devices (``device_measurement``), all at the same time. Then, while they are quiet, the network:
links, sites, the nodes' own lines and the sites' uplinks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from skyctl.errors import InputError, SkyctlError
from skyctl.probe.background_load import LauncherUse, device_conditions
from skyctl.probe.contention import measure_node_lines, measure_uplinks
from skyctl.probe.cut_comparison import compare_on_a_node, known_comparison
from skyctl.probe.device_measurement import (
    FAILED_SHARE,
    ProbeProgress,
    measure_devices,
    probe_order,
    start_processes,
    wait_until_ready,
)
from skyctl.probe.device_probes import DeviceProbes
from skyctl.probe.device_profiles import device_profiles, node_profiles
from skyctl.probe.layer_shapes import find_ties, shape_profiles
from skyctl.probe.link_measurement import LinkSelection, default_link_selection, measure_links, measure_ring
from skyctl.probe.profile_cache import CachedTimings, cached_links, cached_timings, costliest_layers
from skyctl.probe.site_clustering import name_sites
from skyctl.records.base import timestamp
from skyctl.records.cluster import Cluster
from skyctl.records.profile import (
    CutComparison,
    LineProfile,
    LinkProfile,
    Profile,
    ShapeProfile,
    SiteProfile,
    UplinkProfile,
    WorkloadProfile,
)
from skyctl.remote.credentials import make_tls_certificate
from skyctl.remote.peer_addresses import find_peer_addresses

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload
    from skyctl.workload.workload_spec import WorkloadSpec


@dataclass(frozen=True)
class MeasuredNetwork:
    """The measurements between nodes, in the records of a profile."""

    links: Sequence[LinkProfile]
    sites: Sequence[SiteProfile] = ()
    lines: Sequence[LineProfile] = ()
    uplinks: Sequence[UplinkProfile] = ()


@dataclass(frozen=True)
class Recheck:
    """``then``: the profile to look at again; ``holds``: whether a link is still as it was."""

    then: Profile
    holds: Callable[[LinkProfile], bool]


@dataclass(frozen=True)
class ProbeOptions:
    """How a cluster is measured.

    ``budget_s``: about how long the first pass over the layers may take. ``start_s``, ``cap_s``: deadlines
    for a node to be ready, and for its measurement. ``link_selection``: which links are measured (None:
    ``default_link_selection``). ``earlier``: the cluster's profiles, newest first; what still holds is not
    measured again. ``recheck``: a profile to look at again; only its costliest layers and a ring of links (or
    ``link_selection`` "none") are measured. ``encrypt``: messages and links are measured through TLS, as
    training will send them. ``gloo``: what messages cost is measured over Gloo, too, between CPUs.
    ``compare_cut``: a workload's cut is compared with the model itself, unless an
    earlier profile has that.
    """

    budget_s: float = 4.0
    start_s: float = 180.0
    cap_s: float = 180.0
    link_selection: LinkSelection | None = None
    earlier: Sequence[Profile] = ()
    recheck: Recheck | None = None
    encrypt: bool = False
    gloo: bool = False
    compare_cut: bool = True


def measure_cluster(
    cluster: Cluster,
    sessions: Mapping[str, Any],
    workload: Workload | None = None,
    spec: WorkloadSpec | None = None,
    microbatch_choices: Sequence[int] = (),
    on_progress: ProbeProgress = lambda _node, _what, _done: None,
    *,
    node_specs: Mapping[str, WorkloadSpec] | None = None,
    options: ProbeOptions | None = None,
    on_interrupt: Callable[[Profile], None] = lambda _unfinished: None,
) -> Profile:
    """Measures the cluster as it is now. A node that can't be measured is in ``failures`` and hides no other.

    Args:
        sessions: by node name, its session or the error there is instead.
        workload, spec: None: each device's generic speed is measured, with no layer times.
        microbatch_choices: numbers of microbatches a step that may be planned with.
        node_specs: by node, the workload's description with the paths valid there (default: as here).
        on_interrupt: gets the profile of a workload's layers, where KeyboardInterrupt comes after these.

    Raises:
        InputError: a workload without its spec or without a number of microbatches.
        WorkloadError: more microbatches than samples, or cut into layers the workload trains something else.
    """
    if workload is not None and (spec is None or not microbatch_choices):
        raise InputError("probing a workload needs its description and at least one number of microbatches")
    options = options or ProbeOptions()
    probes = DeviceProbes(lambda name, failure: on_progress(name, failure.error, FAILED_SHARE))
    launcher = LauncherUse()
    try:
        specs = {} if workload is None else _probe_specs(cluster, workload, node_specs or {})
        order_of = partial(probe_order, cluster, specs, make_tls_certificate() if options.encrypt else None)
        start_processes(probes, cluster, sessions, order_of, on_progress)
        both = None if workload is None or spec is None else (workload, spec)
        shapes = shape_profiles(*both, microbatch_choices) if both else []  # while nodes import torch
        wait_until_ready(probes, sessions, order_of, options.start_s, on_progress)
        comparison = _compare_cut(probes, workload, shapes, options, on_progress)
        created = timestamp()
        timings = _known_timings(probes, shapes, spec, options, created)
        measure_devices(probes, shapes, options.budget_s, options.cap_s, on_progress, timings)
        timings.complete(probes.alive())
        addresses = peer_addresses(probes, sessions)

        def make_profile(network: MeasuredNetwork, *, interrupted: bool = False) -> Profile:
            conditions = device_conditions(probes.alive(), launcher)
            devices = device_profiles(probes, shapes, conditions, timings.speeds)
            failures = probes.failures
            return Profile(
                cluster=cluster.name,
                cluster_digest=cluster.digest,
                created=created,
                nodes=tuple(node_profiles(probes, sessions, addresses, network.sites)),
                devices=tuple(
                    timings.dated(d, created) for n in cluster.nodes for d in devices if d.node == n.name
                ),
                links=tuple(network.links),
                workload=_workload_profile(workload, spec, shapes, comparison),
                failures=tuple(failures[n.name] for n in cluster.nodes if n.name in failures),
                lines=tuple(line for line in network.lines if line.node not in failures),
                sites=tuple(network.sites),
                uplinks=tuple(network.uplinks),
                encrypted=options.encrypt,
                interrupted=interrupted,
            )

        try:
            network = _find_network(probes, cluster, addresses, timings, options, created, on_progress)
        except KeyboardInterrupt:
            unfinished = make_profile(MeasuredNetwork(()), interrupted=True)
            if workload is not None and unfinished.devices:
                on_interrupt(unfinished)
            raise
        return make_profile(network)
    finally:
        probes.close()


def _known_timings(
    probes: DeviceProbes,
    shapes: Sequence[ShapeProfile],
    spec: WorkloadSpec | None,
    options: ProbeOptions,
    now: str,
) -> CachedTimings:
    """Timings that need not be measured: all but the costliest layers' of a recheck, else those that hold."""
    if options.recheck is not None:
        size = shapes[0].microbatch_size if shapes else 0
        return costliest_layers(options.recheck.then, size, probes.alive())
    dtype = spec.dtype if spec else ""
    return cached_timings(probes.alive(), options.earlier, shapes, dtype, now, gloo=options.gloo)


def _find_network(
    probes: DeviceProbes,
    cluster: Cluster,
    addresses: Mapping[str, str],
    timings: CachedTimings,
    options: ProbeOptions,
    now: str,
    on_progress: ProbeProgress,
) -> MeasuredNetwork:
    """The network between the nodes: a ring of a recheck, what still holds, or all of it measured."""
    if options.recheck is not None and options.link_selection == "none":
        return MeasuredNetwork(())
    if options.recheck is not None:
        on_round = round_progress("links", on_progress)
        return MeasuredNetwork(measure_ring(probes, addresses, options.recheck.holds, on_round))
    cached = (
        cached_links(options.earlier, timings, addresses, now) if options.link_selection is None else None
    )
    if cached is not None:
        return MeasuredNetwork(cached.links, cached.sites, cached.lines, cached.uplinks)
    return measure_network(probes, cluster, addresses, options.link_selection, on_progress)


def _probe_specs(
    cluster: Cluster, workload: Workload, node_specs: Mapping[str, WorkloadSpec]
) -> dict[str, WorkloadSpec]:
    """By node, the workload's description with random inputs: the data may be on some nodes only."""
    given = {node.name: node_specs.get(node.name, workload.spec) for node in cluster.nodes}
    return {name: replace(spec, random_inputs=True) for name, spec in given.items()}


def _compare_cut(
    probes: DeviceProbes,
    workload: Workload | None,
    shapes: Sequence[ShapeProfile],
    options: ProbeOptions,
    on_progress: ProbeProgress,
) -> CutComparison | None:
    """The comparison that is known of the workload's cut, or one that a node makes now."""
    if workload is None:
        return None
    if options.recheck is not None:
        then = options.recheck.then.workload
        return then.comparison if then is not None else None
    if not options.compare_cut:
        return CutComparison(verdict="not compared", reason="--no-compare was given")
    comparison = known_comparison(options.earlier, workload.digest)
    return comparison or compare_on_a_node(probes, shapes, on_progress)


def compare_cluster(
    cluster: Cluster,
    sessions: Mapping[str, Any],
    workload: Workload,
    spec: WorkloadSpec,
    microbatch_choices: Sequence[int],
    on_progress: ProbeProgress,
    node_specs: Mapping[str, WorkloadSpec],
) -> CutComparison:
    """Compares a workload's cut with the model itself on one of the nodes, and measures nothing.

    Raises:
        WorkloadError: cut into layers it trains something else.
    """
    probes = DeviceProbes(lambda name, failure: on_progress(name, failure.error, FAILED_SHARE))
    try:
        order_of = partial(probe_order, cluster, _probe_specs(cluster, workload, node_specs), None)
        start_processes(probes, cluster, sessions, order_of, on_progress)
        shapes = shape_profiles(workload, spec, microbatch_choices)
        wait_until_ready(probes, sessions, order_of, ProbeOptions().start_s, on_progress)
        return compare_on_a_node(probes, shapes, on_progress)
    finally:
        probes.close()


def _workload_profile(
    workload: Workload | None,
    spec: WorkloadSpec | None,
    shapes: Sequence[ShapeProfile],
    comparison: CutComparison | None,
) -> WorkloadProfile | None:
    if workload is None or spec is None or comparison is None:
        return None
    return WorkloadProfile(
        source=spec.source,
        digest=workload.digest,
        batch_size=spec.batch_size,
        dtype=spec.dtype,
        shapes=tuple(shapes),
        ties=find_ties(workload),
        comparison=comparison,
        lora=spec.lora_text,
    )


def measure_network(
    probes: DeviceProbes,
    cluster: Cluster,
    addresses: Mapping[str, str],
    selection: LinkSelection | None,
    on_progress: ProbeProgress,
) -> MeasuredNetwork:
    """Measures links, sites, lines and uplinks between the nodes that have not failed.

    Args:
        selection: which links are measured (None: ``default_link_selection``).
    """
    links, sites = _measure_links(probes, addresses, cluster, selection, on_progress)
    lines, uplinks = _measure_contention(probes, addresses, links, sites, on_progress)
    return MeasuredNetwork(links, sites, lines, uplinks)


def peer_addresses(probes: DeviceProbes, sessions: Mapping[str, Any]) -> dict[str, str]:
    """By node, the address at which its peers reach it; a node without one has failed."""
    alive = {m.node.name: sessions[m.node.name] for m in probes.alive()}
    addresses: dict[str, str] = {}
    for name, outcome in find_peer_addresses(alive).items():
        if isinstance(outcome, SkyctlError):
            probes.fail(name, outcome)
        else:
            addresses[name] = outcome
    return addresses


def _measure_links(
    probes: DeviceProbes,
    addresses: Mapping[str, str],
    cluster: Cluster,
    selection: LinkSelection | None,
    on_progress: ProbeProgress,
) -> tuple[list[LinkProfile], list[SiteProfile]]:
    """The links between the nodes that have not failed, and their sites."""
    selection = selection or default_link_selection(len(addresses))
    links, site_names = measure_links(probes, addresses, round_progress("links", on_progress), selection)
    on_progress("links", "not measured" if selection == "none" else "measured", 1.0)
    gone = set(probes.failures)
    left = ([name for name in site if name not in gone] for site in site_names)
    sites = name_sites([site for site in left if site], cluster.groups)
    return [link for link in links if not {link.source, link.target} & gone], sites


def _measure_contention(
    probes: DeviceProbes,
    addresses: Mapping[str, str],
    links: Sequence[LinkProfile],
    sites: Sequence[SiteProfile],
    on_progress: ProbeProgress,
) -> tuple[list[LineProfile], list[UplinkProfile]]:
    """The nodes' lines and the sites' uplinks. Nodes on one machine, by loopback, have no line in between."""
    apart = {name: address for name, address in addresses.items() if not ip_address(address).is_loopback}
    lines, reasons = measure_node_lines(probes, apart, links, round_progress("lines", on_progress))
    uplinks, others = measure_uplinks(probes, apart, links, sites, round_progress("uplinks", on_progress))
    for name, reason in (*reasons.items(), *others.items()):
        on_progress("lines", f"{name} left out: {reason}", 0.0)
    return lines, uplinks


def round_progress(what: str, on_progress: ProbeProgress) -> Callable[[int, int], None]:
    """A callback that takes rounds done and rounds in all, and reports them as progress of ``what``."""
    return lambda done, of: on_progress(what, f"round {done + 1} of {of}", done / max(1, of))
