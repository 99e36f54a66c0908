"""``probe --quick``: a profile is held against what the cluster shows in a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.errors import InputError, WorkloadError
from skyctl.jobs.node_sessions import NodeSessions, require_all
from skyctl.jobs.profiles import progress_text, ship_timed_workload
from skyctl.jobs.training_request import TrainingRequest
from skyctl.learning.cluster_changes import ClusterChange, machine_changes, machines_of
from skyctl.learning.evidence import RATE_TOLERANCE, TIME_TOLERANCE
from skyctl.probe.layer_shapes import first_layer_names
from skyctl.records.base import GIB
from skyctl.records.cluster import Cluster
from skyctl.records.profile import DeviceProfile, LayerTiming, LinkProfile, Profile
from skyctl.workload.shipped_files import digest_workload

if TYPE_CHECKING:
    from skyctl.workload.workload import Workload
    from skyctl.workload.workload_spec import WorkloadSpec

BUDGET_S = 1.0
MEMORY_TOLERANCE = 0.10
FAST_BYTES_PER_S = 2.5e8
"""Rates above (2 Gbit/s) are the machine's own, its processors' load in them: no plan waits for them."""
LATENCY_TOLERANCE = 0.5
LATENCY_TOLERANCE_S = 0.002
"""A latency may be off by half of itself, and by these seconds."""


def request_of_profile(
    profile: Profile, folder: Path
) -> tuple[TrainingRequest, Workload] | tuple[None, None]:
    """The workload that a profile was taken with, loaded again; Nones where it was taken without.

    A file is looked for where we are, then in ``folder`` (the cluster file's): the one that was measured.

    Raises:
        InputError: it has changed since, or is in neither.
    """
    from skyctl.workload.workload import load_workload
    from skyctl.workload.workload_spec import make_spec

    had = profile.workload
    if had is None:
        return None, None
    specs: list[WorkloadSpec] = []
    for source in (had.source, str(folder / Path(had.source).expanduser())):
        with suppress(WorkloadError):
            specs.append(
                make_spec(
                    source, lora=had.lora, batch_size=had.batch_size, dtype=had.dtype, random_inputs=True
                )
            )
    same = [spec for spec in specs if digest_workload(spec) == had.digest]
    if not same:
        what = "has changed since it was measured" if specs else f"is neither here nor in {folder.absolute()}"
        raise InputError(
            f"{had.source} {what}",
            hint="say where it is: skyctl probe --quick WORKLOAD; or measure it: skyctl probe WORKLOAD",
        )
    workload = load_workload(same[0])
    request = TrainingRequest(
        workload.spec, microbatches=most_microbatches(profile), encrypt=profile.encrypted
    )
    return request, workload


def most_microbatches(profile: Profile) -> int | None:
    """The largest number of microbatches that was measured: then each is smallest, and quickest to time."""
    shapes = profile.workload.shapes if profile.workload is not None else ()
    return max((shape.microbatches for shape in shapes), default=None)


def recheck_profile(
    cluster: Cluster,
    links: NodeSessions,
    then: Profile,
    request: TrainingRequest | None,
    workload: Workload | None,
    on_progress: Callable[[str], None],
    *,
    with_links: bool = True,
) -> Profile:
    """The profile of a quick look: devices, versions, memory, each device's costliest layer, a ring of links.

    Args:
        with_links: whether links are looked at.

    Raises:
        NodeError: no node answered.
    """
    from skyctl.probe.cluster_probe import ProbeOptions, Recheck, measure_cluster

    if not links.sessions:
        require_all(links.failures)
    spec, node_specs = ship_timed_workload(request, links, on_progress)
    links_then = {(link.source, link.target): link for link in then.links}
    return measure_cluster(
        cluster,
        {**links.sessions, **links.failures},
        workload,
        spec,
        [] if request is None or workload is None else request.choices(workload)[0],
        progress_text(on_progress),
        node_specs=node_specs,
        options=ProbeOptions(
            budget_s=BUDGET_S,
            link_selection=None if with_links else "none",
            encrypt=then.encrypted,
            recheck=Recheck(
                then, lambda now: not _link_changes(links_then.get((now.source, now.target)), now)
            ),
        ),
    )


def profile_changes(then: Profile, now: Profile) -> list[ClusterChange]:
    """The changes since then, beyond what two measurements of the same thing may differ by. Pure.

    A node that the profile has no device of, and that failed now, is no difference.
    """
    changes: list[ClusterChange] = []
    nodes = {node.name for node in now.nodes} | {failure.node for failure in now.failures}
    for failure in now.failures:
        if failure.node in {device.node for device in then.devices}:
            changes.append(ClusterChange(failure.node, "node", "measured", failure.error))
    there = {device.id: device for device in now.devices}
    failed = {failure.node for failure in now.failures}
    before = {machine.device: machine for machine in machines_of(then, [d.id for d in then.devices])}
    after = {machine.device: machine for machine in machines_of(now, list(there))}
    for device in then.devices:
        if device.node not in nodes or device.node in failed:
            continue
        if device.id not in there:
            changes.append(ClusterChange(device.id, "device", device.name, "not there"))
            continue
        if device.id in before:
            changes += machine_changes(before[device.id], after[device.id])
        changes += _device_changes(device, there[device.id], first_layer_names(then))
    new = there.keys() - {device.id for device in then.devices}
    changes += [
        ClusterChange(name, "device", "not measured before", there[name].name) for name in sorted(new)
    ]
    links = {(link.source, link.target): link for link in then.links}
    for link in now.links:
        changes += _link_changes(links.get((link.source, link.target)), link)
    return changes


def _device_changes(then: DeviceProfile, now: DeviceProfile, names: dict[str, str]) -> list[ClusterChange]:
    changes = []
    if now.memory_bytes < then.memory_bytes * (1 - MEMORY_TOLERANCE):
        had, has = (f"{device.memory_bytes / GIB:.2f} GiB" for device in (then, now))
        change = f"{now.memory_bytes / then.memory_bytes - 1:+.0%}"
        changes.append(ClusterChange(then.id, "usable memory", had, has, change))
    timings_then = {(t.signature, t.microbatch_size): t for t in then.timings}
    for timing in now.timings:
        had_t = timings_then.get((timing.signature, timing.microbatch_size))
        had_s = _layer_s(had_t) if had_t is not None else None
        if not had_s:
            continue
        has_s = _layer_s(timing)
        name = names.get(timing.signature, "a layer")
        what = f"{name}, microbatch of {timing.microbatch_size}"
        if has_s is None:
            changes.append(
                ClusterChange(then.id, what, f"{had_s * 1e3:.2f} ms", timing.skipped or "no figures")
            )
        elif abs(has_s / had_s - 1) > TIME_TOLERANCE:
            change = f"{has_s / had_s - 1:+.0%}"
            changes.append(
                ClusterChange(then.id, what, f"{had_s * 1e3:.2f} ms", f"{has_s * 1e3:.2f} ms", change)
            )
    return changes


def _layer_s(timing: LayerTiming) -> float | None:
    if timing.forward_s is None or timing.backward_s is None:
        return None
    return timing.forward_s + timing.backward_s


def _link_changes(then: LinkProfile | None, now: LinkProfile) -> list[ClusterChange]:
    """The changes of a link; none where it was not measured then."""
    if then is None or then.estimated or then.error is not None:
        return []
    where = f"{now.source} → {now.target}"
    if now.error is not None or now.latency_s is None or now.bandwidth_bytes_per_s is None:
        return [ClusterChange(where, "link", "connected", now.error or "no figures")]
    changes = []
    had_s, had_rate = then.latency_s, then.bandwidth_bytes_per_s
    if had_s is not None and abs(now.latency_s - had_s) > LATENCY_TOLERANCE * had_s + LATENCY_TOLERANCE_S:
        change = f"{(now.latency_s - had_s) * 1e3:+.1f} ms"
        had, has = f"{had_s * 1e3:.1f} ms", f"{now.latency_s * 1e3:.1f} ms"
        changes.append(ClusterChange(where, "latency", had, has, change))
    fast = min(now.bandwidth_bytes_per_s, had_rate or 0.0) > FAST_BYTES_PER_S
    if had_rate and not fast and abs(now.bandwidth_bytes_per_s / had_rate - 1) > RATE_TOLERANCE:
        had, has = (f"{rate * 8 / 1e6:.0f} Mbit/s" for rate in (had_rate, now.bandwidth_bytes_per_s))
        changes.append(
            ClusterChange(where, "rate", had, has, f"{now.bandwidth_bytes_per_s / had_rate - 1:+.0%}")
        )
    return changes
