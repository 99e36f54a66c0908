"""Reads what a device's probe sends, and refuses what none would: its node then can't be measured.

It checks kinds, types and ranges (``probe.node.probe_events``), and that a device is one of the node's own
and the one that was asked for. It also checks that just the layers that were to be timed are, and that no
figure is faster than physics. A device that only claims to be faster than it is can't be told before it
trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from skyctl.agent.message_fields import with_index
from skyctl.agent.task_events import AliveEvent, DoneEvent, LogEvent, read_as_json, unknown_event
from skyctl.errors import ProtocolError
from skyctl.probe.node.probe_events import MAX_BYTES_PER_S, MAX_FLOPS_PER_S, PROBE_EVENTS, ProbeFacts
from skyctl.records.cluster import Node
from skyctl.records.profile import ShapeProfile
from skyctl.remote.remote_task import translate_task_failure

_EVENT_TYPES: Mapping[str, type] = {cls.kind: cls for cls in (*PROBE_EVENTS, LogEvent, AliveEvent, DoneEvent)}
LayerFlops = Mapping[tuple[str, int], float]
"""By signature and microbatch size, a layer's FLOPs."""


class ProbedDevice(Protocol):
    """The part of a ``device_probes.DeviceProbe`` that is looked at."""

    node: Node
    asked: str | None
    workload: str | None
    facts: dict[str, Any]


def read_probe_message(member: ProbedDevice, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with nothing in it that nobody knows.

    Raises:
        ProtocolError: no probe sends that, or not this one.
        SkyctlError: how the probe has ended.
    """
    kind = str(message.get("event"))
    if kind in ("error", "exit"):
        raise translate_task_failure(member.node, message, member.workload)
    cls = _EVENT_TYPES.get(kind)
    if cls is None:
        raise unknown_event(message, member.node.name)
    event = read_as_json(cls, message, member.node.name)
    if cls is ProbeFacts and (fault := _fault_of_facts(member, event)) is not None:
        raise ProtocolError(f"node {member.node.name} {fault}", node=member.node.name)
    return event


def _fault_of_facts(member: ProbedDevice, facts: Mapping[str, Any]) -> str | None:
    if member.facts:
        return "said twice what it found"
    ids = [device["id"] for device in facts["devices"]]
    if len(set(ids)) != len(ids):
        return f"lists a device twice: {', '.join(ids)[:100]}"
    if (member.asked or facts["device"]) != facts["device"] or with_index(facts["device"]) not in ids:
        return f"measures {facts['device']}; it was to be {member.asked or 'one of ' + ', '.join(ids)[:100]}"
    wanted = member.node.devices
    if wanted is not None and not set(ids) <= set(map(with_index, wanted)):
        return f"has devices {', '.join(ids)[:100]}; cluster.yaml names {', '.join(wanted)}"
    return None


def layer_flops(shapes: Sequence[ShapeProfile]) -> LayerFlops:
    """The layers that a device is to time."""
    return {
        (layer.signature, shape.microbatch_size): layer.flops for shape in shapes for layer in shape.layers
    }


def check_timings(node: Node, timings: Sequence[Mapping[str, Any]], flops: LayerFlops) -> None:
    """Whether a device has timed what it was to time, and no faster than anything could.

    Raises:
        ProtocolError: it has not.
    """
    timed = [(row["signature"], row["microbatch_size"]) for row in timings]
    if sorted(timed) != sorted(flops):
        raise ProtocolError(
            f"node {node.name} has timed {len(timed)} layers, not the {len(flops)} it was told of",
            node=node.name,
        )
    measured = [
        (flops[key], row["forward_s"] + row["backward_s"])
        for key, row in zip(timed, timings, strict=True)
        if "forward_s" in row and "backward_s" in row
    ]
    total_flops, total_s = sum(count for count, _ in measured), sum(seconds for _, seconds in measured)
    if total_flops > MAX_FLOPS_PER_S * total_s:
        raise ProtocolError(
            f"node {node.name} claims {total_flops:.3g} FLOPs in {total_s:.3g} s: no device is that fast",
            node=node.name,
        )


def check_arrivals(
    node: Node, arrivals: Mapping[str, Sequence[float]], sizes: Mapping[str, int], messages: int
) -> None:
    """Whether times of arrival are those of the flows that a node was to receive.

    Args:
        sizes: by peer, the bytes of each of its ``messages``.

    Raises:
        ProtocolError: they are not.
    """
    fault = None
    if set(arrivals) != set(sizes):
        fault = f"flows of {', '.join(arrivals)[:100]}, not of {', '.join(sizes)}"
    for peer, times_s in arrivals.items() if fault is None else ():
        if len(times_s) > messages or list(times_s) != sorted(times_s):
            fault = f"{len(times_s)} messages of {peer}, {messages} at most, in the order of their arrival"
        elif times_s and len(times_s) * sizes[peer] > MAX_BYTES_PER_S * times_s[-1]:
            fault = f"a flow of {peer} that is faster than any link"
    if fault is not None:
        raise ProtocolError(f"node {node.name} tells of {fault}", node=node.name)
