"""The events that a device's probe sends the launcher: one frozen record for each kind.

``agent.task_events`` reads them. Figures have physical limits: a device that claims to be faster than any
there is, or to take less than no time, is refused. Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import (
    Address,
    Bytes,
    Count,
    DeviceName,
    Index,
    Label,
    MaxLength,
    Port,
    Seconds,
    Within,
)

MAX_FLOPS_PER_S = 1e18
"""Two orders of magnitude above the fastest accelerator of 2026."""
MAX_BYTES_PER_S = 1e14
"""Likewise above what any link moves, or any processor moves within its caches."""
MAX_LATENCY_S = 3600.0
MAX_DEVICES = 256

Rate = Annotated[float, Within(1e-3, MAX_BYTES_PER_S)]
FlopsPerSecond = Annotated[float, Within(1e-3, MAX_FLOPS_PER_S)]
ByteSeconds = Annotated[float, Within(0.0, 1.0)]
"""Seconds for a byte."""
Ratio = Annotated[float, Within(0.0, 1e9)]
CpuCount = Annotated[float, Within(1e-6, 1e6)]


@dataclass(frozen=True)
class FoundDevice:
    """A device of the node."""

    id: DeviceName
    name: Label


@dataclass(frozen=True)
class ProbeFacts:
    """Facts that the process found where it was started (``device.node_environment.collect_environment``).

    ``device``: which one it is for. ``max_cpu_isa``: as a profile has it.
    """

    kind: ClassVar[str] = "facts"
    device: DeviceName
    hostname: Label
    platform: Label
    python: Label
    torch: Label
    cpu_model: Label
    cpus: CpuCount
    threads: Annotated[int, Within(1, 10**6)]
    memory_total_bytes: Bytes
    memory_available_bytes: Bytes
    devices: Annotated[tuple[FoundDevice, ...], MaxLength(MAX_DEVICES)]
    max_cpu_isa: Label | None = None
    cpu_scope: str | None = None
    bound: bool = False
    quota_period_s: Seconds | None = None
    affinity: Annotated[tuple[Index, ...], MaxLength(10_000)] | None = None
    numa_nodes: Count | None = None
    boot_id: Label | None = None


@dataclass(frozen=True)
class ComparedEvent:
    """The outcome of training the model whole and cut (``worker.cut_check``), or the error for the user."""

    kind: ClassVar[str] = "compared"
    verdict: Label = "not compared"
    reason: str | None = None
    seconds: Seconds = 0.0
    error: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class PassedEvent:
    """The first pass over the layers is over."""

    kind: ClassVar[str] = "passed"


@dataclass(frozen=True)
class MeasuredEvent:
    """The layers are measured; the device is only kept busy now."""

    kind: ClassVar[str] = "measured"


@dataclass(frozen=True)
class ProgressEvent:
    """So many of so many are done. ``what``: what is under way."""

    kind: ClassVar[str] = "progress"
    done: Index
    of: Index
    what: Label


@dataclass(frozen=True)
class LayerFigures:
    """One layer's figures, as ``records.profile.LayerTiming`` has them."""

    signature: Label
    microbatch_size: Count
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    optimizer_s: Seconds | None = None
    spread: Annotated[float, Within(-1e9, 1e9)] | None = None
    repeats: Index = 0
    skipped: str | None = None
    weight_s: Seconds | None = None
    split_s: Seconds | None = None
    interval: Ratio | None = None


@dataclass(frozen=True)
class GpuUse:
    """The use that others made of a card before it was measured."""

    busy: Annotated[float, Within(0.0, 1.0)] | None = None
    held_bytes: Bytes | None = None


@dataclass(frozen=True)
class LoadCounts:
    """The counts taken while the device was measured (``probe.node.load_counters``)."""

    wall_s: Annotated[float, Within(1e-6, 1e9)]
    own_s: Seconds | None = None
    scope_s: Seconds | None = None
    machine_s: Seconds | None = None
    steal_s: Seconds | None = None
    ran_s: Seconds | None = None
    waited_s: Seconds | None = None
    machine_cpus: Annotated[int, Within(1, 10**6)] | None = None
    left_out_s: Seconds | None = None
    overheated: Annotated[float, Within(-1e12, 1e12)] | None = None
    gpu: GpuUse | None = None
    halted_share: Annotated[float, Within(0.0, 1.0)] | None = None


@dataclass(frozen=True)
class MessageFigures:
    """The costs of messages over one backend."""

    handling_s: Seconds
    handling_byte_s: ByteSeconds
    step_s: Seconds
    message_byte_s: ByteSeconds
    ring_byte_s: ByteSeconds | None = None


@dataclass(frozen=True)
class TimingsEvent:
    """All that was measured on the device."""

    kind: ClassVar[str] = "timings"
    threads: Annotated[int, Within(1, 10**6)]
    timings: tuple[LayerFigures, ...]
    flops_per_s: FlopsPerSecond | None
    memory_bytes: Bytes
    memory_from: Label
    memory_scope: str | None
    reserved_bytes: Bytes
    own_bytes: Bytes
    watched: LoadCounts | None = None
    handling_s: Seconds = 0.0
    handling_byte_s: ByteSeconds = 0.0
    action_s: Seconds = 0.0
    step_s: Seconds = 0.0
    reduce_byte_s: ByteSeconds = 0.0
    message_byte_s: ByteSeconds = 0.0
    gloo: MessageFigures | None = None
    gloo_error: str | None = None


@dataclass(frozen=True)
class LinkListening:
    """The address and port at which the process waits for the other end of a link."""

    kind: ClassVar[str] = "listening"
    address: Address
    port: Port


@dataclass(frozen=True)
class LinkFigures:
    """One end's figures of a link; ``error``: why there are none."""

    kind: ClassVar[str] = "link"
    latency_s: Annotated[float, Within(0.0, MAX_LATENCY_S)] | None = None
    bandwidth_bytes_per_s: Rate | None = None
    send_byte_s: ByteSeconds | None = None
    receive_byte_s: ByteSeconds | None = None
    error: str | None = None


@dataclass(frozen=True)
class HubListening:
    """The address and ports at which a hub waits for its peers, in the order in which it was told of them."""

    kind: ClassVar[str] = "line-listening"
    hub: Label
    address: Address
    ports: Annotated[tuple[Port, ...], MaxLength(1000)]


@dataclass(frozen=True)
class HubReady:
    """A hub's peers are connected."""

    kind: ClassVar[str] = "line-ready"
    hub: Label


@dataclass(frozen=True)
class FlowArrivals:
    """When each message was there, by peer, in seconds from the go; ``error``: why that is not known.

    ``busy_share``: the part of a node's CPU quota that its flows took; None: it has none.
    """

    kind: ClassVar[str] = "line"
    hub: Label
    arrivals: Annotated[Mapping[str, tuple[Seconds, ...]], MaxLength(1000)] | None = None
    busy_share: Seconds | None = None
    error: str | None = None


PROBE_EVENTS = (
    ProbeFacts,
    ComparedEvent,
    PassedEvent,
    MeasuredEvent,
    ProgressEvent,
    TimingsEvent,
    LinkListening,
    LinkFigures,
    HubListening,
    HubReady,
    FlowArrivals,
)
