"""The planner's problem from a profile's measurements; the only module that knows both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import fmean, median
from typing import Any

from skyctl.errors import InputError, InvalidRecordError, MismatchError
from skyctl.learning.figure_uncertainty import (
    OVERHEAD,
    combine_uncertainties,
    link_uncertainty,
    slice_uncertainty,
    time_uncertainty,
)
from skyctl.records.base import describe
from skyctl.records.cluster import is_cpu
from skyctl.records.problem import (
    Device,
    Layer,
    LayerTimes,
    Link,
    Objective,
    Parallel,
    Problem,
    Schedule,
    SharedResource,
)
from skyctl.records.profile import (
    HANDLING_NEIGHBOURS,
    DeviceProfile,
    LayerTiming,
    Profile,
    ShapeProfile,
    WorkloadProfile,
)
from skyctl.worker.pipeline.receive_window import receive_window

HEAP_SHARE = 1.25
"""Bytes a process holds per byte of activations on a CPU: its heap has gaps (docs/decisions.md)."""

RANK_BYTES = float(20 << 20)
"""Bytes a rank on a CPU holds that a probe does not: connections, their threads' heaps, buffers."""


def build_problem(
    profile: Profile,
    microbatches: int,
    *,
    schedule: Schedule = "1f1b",
    objective: Objective = "iteration",
    first_stage: Sequence[str] | None = None,
    last_stage: Sequence[str] | None = None,
    only_nodes: Sequence[str] | None = None,
    parallel: Parallel = "pipeline",
) -> Problem:
    """The problem at one number of microbatches.

    Args:
        profile: must hold a workload that was measured at ``microbatches``.
        first_stage, last_stage: node names whose devices alone may hold that stage (``--pin-first``).
        only_nodes: leave out every other node's devices (``--limit``).
        parallel: all but ``pipeline``: with what summing gradients takes, which a pipeline's does not say.

    Raises:
        InputError: no workload in the profile, it was not measured at that number of microbatches, or its
            figures contradict each other.
        MismatchError: no device is left, or a pin names a node without a measured device.
    """
    shape = measured_shape(profile, microbatches)
    devices = [d for d in profile.devices if only_nodes is None or d.node in only_nodes]
    if not devices:
        raise MismatchError(
            f"the profile of cluster {profile.cluster!r} has no device on {', '.join(only_nodes or ['any'])}",
            hint="probe those nodes first: skyctl probe WORKLOAD",
        )
    heap = HEAP_SHARE if any(is_cpu(d.id) for d in devices) else 1.0
    message_bytes = median(layer.output_bytes for layer in shape.layers)
    try:
        times = {d.id: _times(d, shape) for d in devices}
        return Problem(
            layers=tuple(
                Layer(
                    name=layer.name,
                    flops=layer.flops,
                    state_bytes=layer.state_bytes,
                    activation_bytes=layer.activation_bytes * heap,
                    output_bytes=layer.output_bytes,
                    workspace_bytes=layer.workspace_bytes,
                    deferred_bytes=layer.deferred_bytes * heap,
                    gradient_bytes=layer.gradient_bytes if parallel != "pipeline" else None,
                )
                for layer in shape.layers
            ),
            devices=tuple(
                Device(
                    id=d.id,
                    flops_per_s=d.flops_per_s,
                    memory_bytes=d.memory_bytes,
                    reserved_bytes=d.reserved_bytes + (RANK_BYTES if is_cpu(d.id) else 0.0),
                    action_s=d.action_s,
                    step_s=d.step_s,
                    neighbour_s=d.handling_s / HANDLING_NEIGHBOURS
                    + _byte_s(profile, d, devices) * message_bytes,
                    time_uncertainty=combine_uncertainties(
                        time_uncertainty(d, shape),
                        _slice_uncertainty(profile, d, times[d.id], microbatches, len(devices)),
                    ),
                    overhead_uncertainty=OVERHEAD,
                    **(_sum_costs(profile, d, devices) if parallel != "pipeline" else {}),
                )
                for d in devices
            ),
            times=times,
            links=_links(profile, devices),
            shared=(*_lines(profile, devices), *_uplinks(profile, devices)),
            first_stage=_pinned(first_stage, devices, "--pin-first"),
            last_stage=_pinned(last_stage, devices, "--pin-last"),
            microbatches=microbatches,
            receive_window=_receive_window(shape),
            schedule=schedule,
            objective=objective,
            parallel=parallel,
            ties=measured_workload(profile).ties,
        )
    except InvalidRecordError as exc:
        raise InputError(
            f"the profile of cluster {profile.cluster!r} of {profile.created} can't be planned with: "
            f"{describe(exc)}",
            hint="measure again: skyctl probe WORKLOAD --refresh",
        ) from exc


def _slice_uncertainty(
    profile: Profile, device: DeviceProfile, times: LayerTimes, microbatches: int, devices: int
) -> float:
    """Of the device's times, where its node's quota comes in slices: as of a stage with an even share."""
    node = next((node for node in profile.nodes if node.name == device.node), None)
    if node is None or node.quota_period_s is None or not is_cpu(device.id):
        return 0.0
    slice_s = node.quota_period_s * min(1.0, node.cpus)
    forward_s, backward_s = sum(times.forward_s) / devices, sum(times.backward_s) / devices
    step_s = microbatches * (forward_s + backward_s)
    return slice_uncertainty(slice_s, node.quota_period_s, forward_s, step_s)


def _byte_s(profile: Profile, device: DeviceProfile, devices: Sequence[DeviceProfile]) -> float:
    """Seconds a stage on the device takes per neighbour and byte of the messages to and from it.

    As measured over loopback, or over the links to the two nodes where it is least, whichever is more.
    """
    least = sorted(_link_byte_s(profile, device, devices))[:2]
    here = device.handling_byte_s / HANDLING_NEIGHBOURS
    return max(here, fmean(least)) if least else here


def _link_byte_s(profile: Profile, device: DeviceProfile, devices: Sequence[DeviceProfile]) -> list[float]:
    """By peer: seconds of the device's node to send it a byte and to receive one, together.

    Only of links where that was measured: those of nodes under a CPU quota.
    """
    nodes = {other.node for other in devices}
    ends: dict[str, list[float]] = {}
    for link in profile.links:
        if {link.source, link.target} <= nodes and link.source != link.target:
            if link.source == device.node and link.source_byte_s is not None:
                ends.setdefault(link.target, []).append(link.source_byte_s)
            if link.target == device.node and link.target_byte_s is not None:
                ends.setdefault(link.source, []).append(link.target_byte_s)
    return [sum(both) for both in ends.values() if len(both) == 2]


def _sum_costs(profile: Profile, device: DeviceProfile, devices: Sequence[DeviceProfile]) -> dict[str, Any]:
    """The seconds that a byte of gradients takes of the device: ``reduce_byte_s`` and ``message_byte_s``.

    A message's byte as a sum over loopback has it, and what the links take more than loopback, by the one
    where it is least: over a slow link data come in small pieces, which cost more a byte, but there the line
    is busier than the processor.
    """
    loopback = device.handling_byte_s / (2 * HANDLING_NEIGHBOURS)
    more = max(0.0, min(_link_byte_s(profile, device, devices), default=0.0) / 2 - loopback)
    return {"reduce_byte_s": device.reduce_byte_s, "message_byte_s": device.message_byte_s + more}


def _receive_window(shape: ShapeProfile) -> int:
    """How many receives the worker would post ahead; their buffers count as memory."""
    return receive_window(0, shape.microbatches, max(layer.output_bytes for layer in shape.layers))


def measured_workload(profile: Profile) -> WorkloadProfile:
    """The profile's workload; InputError where it was taken without one."""
    if profile.workload is None:
        raise InputError(
            f"the profile of cluster {profile.cluster!r} of {profile.created} was taken without a workload",
            hint="measure the workload's layers: skyctl probe WORKLOAD",
        )
    return profile.workload


def measured_shape(profile: Profile, microbatches: int) -> ShapeProfile:
    """The measured shape with that many microbatches; InputError names those that were measured."""
    shapes = measured_workload(profile).shapes
    for shape in shapes:
        if shape.microbatches == microbatches:
            return shape
    there = ", ".join(str(s.microbatches) for s in shapes)
    raise InputError(
        f"the profile holds measurements for {there} microbatches, not for {microbatches}",
        hint=f"probe at that size: skyctl probe WORKLOAD --microbatches {microbatches}",
    )


def _times(device: DeviceProfile, shape: ShapeProfile) -> LayerTimes:
    """Seconds per layer, in the workload's order.

    A layer that was skipped there (too large for the device) gets the time its flops would take; the
    device's memory keeps it away.
    """
    measured: dict[str, LayerTiming] = {
        t.signature: t for t in device.timings if t.microbatch_size == shape.microbatch_size
    }
    forward, backward, optimizer = [], [], []
    weight: list[float | None] = []
    split: list[float | None] = []
    for layer in shape.layers:
        timing = measured.get(layer.signature)
        if timing is None:
            raise MismatchError(
                f"device {device.id!r} has no measurement of layer {layer.name!r} at "
                f"{shape.microbatch_size} samples",
                hint="probe again: skyctl probe WORKLOAD",
            )
        if timing.forward_s is None or timing.backward_s is None:
            forward.append(layer.flops / 3 / device.flops_per_s)
            backward.append(layer.flops * 2 / 3 / device.flops_per_s)
            weight.append(layer.flops / 3 / device.flops_per_s)
            split.append(backward[-1])
        else:
            forward.append(timing.forward_s)
            backward.append(timing.backward_s)
            weight.append(timing.weight_s)
            split.append(timing.split_s)
        optimizer.append(timing.optimizer_s or 0.0)
    return LayerTimes(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        optimizer_s=tuple(optimizer),
        weight_s=_all_known(weight),
        split_s=_all_known(split),
    )


def _all_known(seconds: Sequence[float | None]) -> tuple[float, ...] | None:
    known_s = tuple(x for x in seconds if x is not None)
    return known_s if len(known_s) == len(seconds) else None


def _links(profile: Profile, devices: Sequence[DeviceProfile]) -> tuple[Link, ...]:
    """Links between devices, from links between their nodes; a pair without figures is made useless."""
    by_node: dict[str, list[str]] = {}
    for device in devices:
        by_node.setdefault(device.node, []).append(device.id)
    links = []
    for link in profile.links:
        for source in by_node.get(link.source, []):
            for target in by_node.get(link.target, []):
                if source == target:
                    continue
                if link.bandwidth_bytes_per_s is None or link.latency_s is None:
                    links.append(_broken(source, target))
                    continue
                links.append(
                    Link(
                        source=source,
                        target=target,
                        latency_s=link.latency_s,
                        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                        uncertainty=link_uncertainty(link),
                    )
                )
    return tuple(links)


def _lines(profile: Profile, devices: Sequence[DeviceProfile]) -> tuple[SharedResource, ...]:
    """A resource for each node's shared line and direction, over all its devices' links with other nodes.

    Left out where only one other device is there: no two links are left that could share.
    """
    resources = []
    for line in profile.lines:
        own = [d.id for d in devices if d.node == line.node]
        others = [d.id for d in devices if d.node != line.node]
        if not own or len(others) < 2:
            continue
        pairs = [
            (other, mine) if line.direction == "in" else (mine, other) for mine in own for other in others
        ]
        resources.append(
            SharedResource(
                name=f"{line.node} {line.direction}",
                bandwidth_bytes_per_s=line.bandwidth_bytes_per_s,
                links=tuple(pairs),
            )
        )
    return tuple(resources)


def _uplinks(profile: Profile, devices: Sequence[DeviceProfile]) -> tuple[SharedResource, ...]:
    """A resource for each site's shared uplink and direction, over all links that cross it that way.

    Left out where fewer than two links are left to share it.
    """
    inside = {site.name: set(site.nodes) for site in profile.sites}
    resources = []
    for uplink in profile.uplinks:
        nodes = inside.get(uplink.site, set())
        own = [d.id for d in devices if d.node in nodes]
        others = [d.id for d in devices if d.node not in nodes]
        if len(own) * len(others) < 2:
            continue
        pairs = product(others, own) if uplink.direction == "in" else product(own, others)
        resources.append(
            SharedResource(
                name=f"site {uplink.site} {uplink.direction}",
                bandwidth_bytes_per_s=uplink.bandwidth_bytes_per_s,
                links=tuple(pairs),
            )
        )
    return tuple(resources)


BROKEN_LATENCY_S = 3600.0
"""The latency given to a pair that could not be connected: no plan with another choice takes it."""


def _broken(source: str, target: str) -> Link:
    return Link(source=source, target=target, latency_s=BROKEN_LATENCY_S, bandwidth_bytes_per_s=1e6)


def _pinned(
    nodes: Sequence[str] | None, devices: Sequence[DeviceProfile], flag: str
) -> tuple[str, ...] | None:
    if nodes is None:
        return None
    pinned = tuple(d.id for d in devices if d.node in nodes)
    if not pinned:
        raise MismatchError(f"{flag} {', '.join(nodes)}: no measured device is on these nodes")
    return pinned
