"""Measuring a cluster, keeping the profile, and finding the one that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.control.connect import Connected, need_all
from skyctl.control.request import Request
from skyctl.errors import InputError, NodeError, SkyctlError
from skyctl.files import newest_profile, read_record, save_profile
from skyctl.records.cluster import Cluster, Node, device_id
from skyctl.records.profile import NodeFailure, Profile

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload


def probe_cluster(
    cluster: Cluster,
    links: Connected,
    request: Request | None,
    workload: Workload | None,
    on_progress: Callable[[str], None],
) -> tuple[Profile, Path]:
    """Measures every node that answered, adds those that did not as failures, and keeps the profile.

    Raises:
        NodeError: no node could be measured at all.
    """
    from skyctl.control.request import send_workload
    from skyctl.probe.collect import probe

    if not links.sessions:
        need_all(links.failures)
    spec = None
    told: dict[str, dict[str, Any]] = {}
    if request is not None:
        # Layers are timed on made-up inputs: data() is for the nodes that train on it, and on those only.
        spec = replace(request.spec, random_inputs=True, data_path=None)
        on_progress("shipping the workload")
        told = send_workload(spec, links.sessions, with_data=())
    profile = probe(
        cluster,
        {**links.sessions, **links.failures},
        workload,
        spec,
        request.choices() if request is not None else [],
        lambda node, what, share: on_progress(f"{node}: {what}" + (f" {share:.0%}" if share else "")),
        node_specs=told,
    )
    if not profile.devices:
        raise _nobody(list(profile.failures))
    return profile, save_profile(profile)


def left_out(profile: Profile, nodes: Sequence[Node]) -> list[str]:
    """Those of the nodes that have no measured device in the profile."""
    measured = {device.node for device in profile.devices}
    return [node.name for node in nodes if node.name not in measured]


def _as_now(node: Node, profile: Profile) -> bool:
    """Whether the profile's devices of the node are what cluster.yaml says of it now."""
    devices = [device for device in profile.devices if device.node == node.name]
    wanted = {device_id(node.name, name) for name in node.devices or ()}
    return (
        bool(devices)
        and (not wanted or wanted == {device.id for device in devices})
        and all(
            device.slowdown == node.slowdown
            and (node.threads is None or device.threads in (None, node.threads))
            and (node.memory_gib is None or device.memory_bytes <= node.memory_gib * 2**30)
            for device in devices
        )
    )


def _nobody(failures: Sequence[NodeFailure]) -> SkyctlError:
    lines = "".join(f"\n  {failure.node}: {failure.error}" for failure in failures)
    return NodeError(
        f"no node could be measured:{lines}",
        node=failures[0].node if failures else "?",
        hint="skyctl check shows what to do about each",
    )


def find_profile(
    cluster: Cluster, given: str | None, fits: Callable[[Profile], bool], what: str
) -> tuple[Profile, Path]:
    """The profile the user named, or the cluster's newest that fits.

    Args:
        fits: whether a profile holds what is wanted.
        what: what that is, for the message where none does.

    Raises:
        InputError: there is none, or the one given does not fit.
    """
    if given is not None:
        profile = read_record(Profile, given)
        if not fits(profile):
            raise InputError(
                f"the profile {given} holds no measurements of {what}",
                hint=f"probe it first: skyctl probe {what}",
            )
        return profile, Path(given)
    found = newest_profile(cluster.name, fits)
    if found is None:
        raise InputError(
            f"cluster {cluster.name!r} has no profile with measurements of {what}",
            hint=f"probe it first: skyctl probe {what}",
        )
    return found[1], found[0]


def fits_request(request: Request, workload: Workload, nodes: Sequence[Node]) -> Callable[[Profile], bool]:
    """Whether a profile was measured with this workload, batch, dtype, one of its sizes, and on these nodes.

    Every node must have been measured as cluster.yaml has it now, or have failed to be (``left_out``).
    """

    def fits(profile: Profile) -> bool:
        measured = profile.workload
        failed = {failure.node for failure in profile.failures}
        if measured is None or not all(node.name in failed or _as_now(node, profile) for node in nodes):
            return False
        return (
            measured.digest == workload.digest
            and measured.batch_size == request.spec.batch_size
            and measured.dtype == request.spec.dtype
            and (
                request.microbatches is None
                or any(shape.microbatches == request.microbatches for shape in measured.shapes)
            )
        )

    return fits
