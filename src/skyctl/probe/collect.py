"""Measures a whole cluster: every device, every pair, and a workload's distinct layers → a ``Profile``.

First the devices (``devices``), all at the same time; links come after, in quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from skyctl.errors import InputError, SkyctlError
from skyctl.probe.devices import FAILED, Progress, measure, payload_of, ready, start
from skyctl.probe.earlier import costliest, known_links, known_timings, now_iso
from skyctl.probe.fleet import Fleet
from skyctl.probe.found import device_profiles, node_profiles
from skyctl.probe.links import How
from skyctl.probe.network import Network, addresses_of, measure_network, rounds_of
from skyctl.probe.ring import measure_ring
from skyctl.probe.shapes import shapes_of
from skyctl.probe.watching import OwnUse, conditions
from skyctl.records.cluster import Cluster
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
        payload = partial(payload_of, cluster, specs, tls)
        start(fleet, cluster, sessions, payload, on_progress)
        if workload is not None and spec is not None:  # while the nodes import torch
            shapes = shapes_of(workload, spec, microbatch_choices)
        ready(fleet, sessions, payload, start_s, on_progress)
        created = now_iso()
        if recheck is None:
            known = known_timings(fleet.alive(), earlier, shapes, spec.dtype if spec else "", created)
        else:
            size = shapes[0].microbatch_size if shapes else 0
            known = costliest(recheck.then, size, fleet.alive())
        measure(fleet, shapes, budget_s, cap_s, on_progress, known)
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
