"""Measuring a cluster, keeping the profile, and finding the one that fits."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.errors import InputError, NodeError, SkyctlError
from skyctl.files import newest_profile, read_record, recent_profiles, save_profile
from skyctl.jobs.node_sessions import NodeSessions, require_all
from skyctl.jobs.training_request import TrainingRequest, send_workload
from skyctl.learning.observations import gather_evidence
from skyctl.records.base import GIB, timestamp
from skyctl.records.clock import is_ahead
from skyctl.records.cluster import Cluster, Node, device_id
from skyctl.records.profile import CutComparison, NodeFailure, Profile

if TYPE_CHECKING:
    from skyctl.probe.link_measurement import LinkSelection
    from skyctl.workload.workload import Workload
    from skyctl.workload.workload_spec import WorkloadSpec


def probe_cluster(
    cluster: Cluster,
    links: NodeSessions,
    request: TrainingRequest | None,
    workload: Workload | None,
    on_progress: Callable[[str], None],
    on_node: Callable[[str, str, float], None] | None = None,
    *,
    link_selection: LinkSelection | None = None,
    refresh: bool = False,
    encrypt: bool = False,
    gloo: bool = False,
    on_note: Callable[[str], None] = lambda _text: None,
) -> tuple[Profile, Path]:
    """Measures every node that answered, adds those that did not as failures, and keeps the profile.

    Args:
        on_node: a node's name, what it is at, and how much is done (below 0: it failed, and why); default:
            ``on_progress`` in words.
        refresh: measure everything, also what earlier profiles still say.
        encrypt: measure messages and links through TLS; then only profiles that were taken so count.
        gloo: measure what messages cost over Gloo, too; under TLS it is left out.
        on_note: called with what the user should know of it, such as a number of microbatches left out.

    Raises:
        NodeError: no node could be measured at all.
        WorkloadError: the model can't take a number of microbatches that the user gave.
    """
    from skyctl.probe.cluster_probe import ProbeOptions, measure_cluster

    if not links.sessions:
        require_all(links.failures)
    choices: list[int] = []
    if request is not None and workload is not None:
        choices, left_out = request.choices(workload)
        for refused in left_out:
            on_note(f"left out: {refused}")
    spec, node_specs = ship_timed_workload(request, links, on_progress)
    recent = recent_profiles(cluster.name, interrupted=True)
    earlier = [profile for profile in recent if profile.encrypted == encrypt]
    unfinished: list[Profile] = []
    try:
        profile = measure_cluster(
            cluster,
            {**links.sessions, **links.failures},
            workload,
            spec,
            choices,
            on_node or progress_text(on_progress),
            node_specs=node_specs,
            options=ProbeOptions(
                link_selection=link_selection,
                earlier=() if refresh else earlier,
                encrypt=encrypt,
                gloo=gloo and not encrypt,
                compare_cut=request is None or request.compare_cut,
            ),
            on_interrupt=unfinished.append,
        )
    except KeyboardInterrupt as exc:
        for profile in unfinished:
            save_profile(profile)
            exc.add_note("the layer times are kept: the next probe measures the links")
        raise
    if not profile.devices:
        raise _nobody_measured(list(profile.failures))
    profile = gather_evidence(profile, earlier)
    return profile, save_profile(profile)


def compare_workload(
    cluster: Cluster,
    links: NodeSessions,
    request: TrainingRequest,
    workload: Workload,
    on_progress: Callable[[str], None],
) -> CutComparison:
    """Compares a workload's cut with the model itself on one node.

    Raises:
        NodeError: no node answered.
        WorkloadError: cut into layers it trains something else.
    """
    from skyctl.probe.cluster_probe import compare_cluster

    if not links.sessions:
        require_all(links.failures)
    spec, node_specs = ship_timed_workload(request, links, on_progress)
    assert spec is not None
    return compare_cluster(
        cluster,
        {**links.sessions, **links.failures},
        workload,
        spec,
        request.choices(workload)[0],
        progress_text(on_progress),
        node_specs,
    )


def ship_timed_workload(
    request: TrainingRequest | None, links: NodeSessions, on_progress: Callable[[str], None]
) -> tuple[WorkloadSpec | None, dict[str, WorkloadSpec]]:
    """Ships a workload whose layers are to be timed; its description, here and by node."""
    if request is None:
        return None, {}
    # Layers are timed on made-up inputs: data() is for the nodes that train on it, and on those only.
    spec = replace(request.spec, random_inputs=True, data_path=None)
    on_progress("shipping the workload")
    return spec, send_workload(spec, links.sessions, with_data=())


def progress_text(on_progress: Callable[[str], None]) -> Callable[[str, str, float], None]:
    """A function that passes on what the probe says of each node, as one line of text."""
    return lambda node, what, share: on_progress(f"{node}: {what}" + (f" {share:.0%}" if share > 0 else ""))


def find_profile(
    cluster: Cluster, given: str | None, request: TrainingRequest, digest: str
) -> tuple[Profile, Path]:
    """The profile the user named, or the cluster's newest that fits the request and the cluster as it is now.

    To one that was not named comes what runs have seen of the same figures. One dated ahead of this machine's
    clock is passed over: how old it is can't be told, and what runs see now would count as older than it.

    Raises:
        InputError: there is none, or the one given does not fit; says why the newest does not.
    """
    hint = f"measure it: skyctl probe {shlex.join(request.words())}"
    if given is not None:
        profile = read_record(Profile, given)
        reason = profile_misfit(profile, request, digest, cluster.nodes)
        if reason is not None:
            raise InputError(f"the profile {given} does not fit: {reason}", hint=hint)
        return profile, Path(given)

    def misfit(profile: Profile) -> str | None:
        if is_ahead(profile.created):
            return f"it is dated {profile.created}, and this machine's clock says {timestamp()}"
        return profile_misfit(profile, request, digest, cluster.nodes)

    newest = newest_profile(cluster.name, lambda profile: misfit(profile) is None)
    if newest is not None:
        return gather_evidence(newest[1], recent_profiles(cluster.name)), newest[0]
    newest = newest_profile(cluster.name)
    if newest is None:
        raise InputError(f"cluster {cluster.name!r} has no profile yet", hint=hint)
    reason = misfit(newest[1])
    raise InputError(
        f"no profile of cluster {cluster.name!r} fits {request.spec.source}; the newest: {reason}", hint=hint
    )


def profile_misfit(
    profile: Profile, request: TrainingRequest, digest: str, nodes: Sequence[Node]
) -> str | None:
    """Why a profile can't serve the request on these nodes, in words; None where it can.

    Every node must have been measured as cluster.yaml has it now, or have failed to be (``left_out``).
    """
    measured = profile.workload
    if measured is None:
        return "it was taken without a workload"
    if profile.interrupted:
        return "its probe was interrupted before it had measured links"
    if measured.digest != digest:
        if measured.lora != request.spec.lora_text:
            return f"it was measured with {f'--lora {measured.lora}' if measured.lora else 'no --lora'}"
        if measured.source == request.spec.source:
            return f"{measured.source} has changed since it was measured"
        return f"it holds {measured.source}"
    if (measured.batch_size, measured.dtype) != (request.spec.batch_size, request.spec.dtype):
        return f"it was measured at a batch of {measured.batch_size} in {measured.dtype}"
    if profile.encrypted != request.encrypt:
        return f"its links were measured {'through' if profile.encrypted else 'without'} TLS (--encrypt)"
    sizes = [shape.microbatches for shape in measured.shapes]
    for wanted in request.sweep or (request.microbatches,):
        if wanted is not None and wanted not in sizes:
            return f"it was measured at {', '.join(map(str, sizes))} microbatches, not at {wanted}"
    failed = {failure.node for failure in profile.failures}
    for node in nodes:
        change = None if node.name in failed else _node_change(node, profile)
        if change is not None:
            return change
    return None


def lacks_links(profile: Profile) -> bool:
    """Whether it has several nodes and not one link between them: all are then taken as free."""
    between = any(link.source != link.target for link in profile.links)
    return len({device.node for device in profile.devices}) > 1 and not between


def unmeasured_nodes(profile: Profile, nodes: Sequence[Node]) -> list[str]:
    """The names of nodes that have no measured device in the profile."""
    measured = {device.node for device in profile.devices}
    return [node.name for node in nodes if node.name not in measured]


def _node_change(node: Node, profile: Profile) -> str | None:
    """A change of the node in cluster.yaml since it was measured, in words; None where there is none."""
    devices = [device for device in profile.devices if device.node == node.name]
    if not devices:
        return f"node {node.name} is not in it"
    ids = {device.id for device in devices}
    wanted = {device_id(node.name, name) for name in node.devices or ()} or ids
    if wanted != ids:
        return f"node {node.name} was measured on {', '.join(sorted(ids))}"
    for device in devices:
        if device.slowdown != node.slowdown:
            return f"{device.id} had slowdown {device.slowdown:g}, now {node.slowdown:g}"
        if node.threads is not None and device.threads not in (None, node.threads):
            return f"{device.id} had {device.threads} threads, now {node.threads}"
        if node.memory_gib is not None and device.memory_bytes > node.memory_gib * GIB:
            had = device.memory_bytes / GIB
            return f"{device.id} had {had:.2f} GiB, now memory_gib is {node.memory_gib:g}"
    return None


def _nobody_measured(failures: Sequence[NodeFailure]) -> SkyctlError:
    lines = "".join(f"\n  {failure.node}: {failure.error}" for failure in failures)
    return NodeError(
        f"no node could be measured:{lines}",
        node=failures[0].node if failures else "?",
        hint="skyctl check shows what to do about each",
    )
