"""What was measured: nodes, devices, links, and a workload's distinct layers on every device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from skyctl.records.base import Bytes, Count, FileRecord, Index, Name, Positive, Record, Seconds, Seq, since


class NodeProfile(Record):
    """One node as found. ``cpus``: how many it may use, a fraction under a quota."""

    name: Name
    hostname: str
    platform: str
    python: str
    torch: str
    cpu_model: str
    cpus: Positive
    memory_total_bytes: Bytes
    memory_available_bytes: Bytes
    address: str | None
    interface: str | None


class LayerTiming(Record):
    """One distinct layer at one microbatch size on one device.

    Seconds per microbatch (``optimizer_s``: per step). ``spread``: (p90 − p10) / median of the blocks
    measured. ``skipped``: why there are no figures. ``split_s``: the backward cut in two, both parts, and
    ``weight_s``: the part of it that only weight gradients need.
    """

    signature: str
    microbatch_size: Count
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    optimizer_s: Seconds | None = None
    spread: float | None = None
    repeats: Index = 0
    skipped: str | None = None
    weight_s: Seconds | None = since(2, None)
    split_s: Seconds | None = since(2, None)


class DeviceProfile(Record):
    """One device as measured. ``memory_bytes``: what a stage can use; ``reserved_bytes``: taken before it.

    ``handling_s``, ``handling_byte_s``: what a microbatch costs a stage here beside its layers (messages,
    Python), and how much more for each byte of a message.
    """

    id: Name
    node: Name
    name: str
    threads: Count | None
    slowdown: float
    memory_bytes: Bytes
    memory_from: str
    reserved_bytes: Bytes
    flops_per_s: Positive
    timings: Seq[LayerTiming] = ()
    handling_s: Seconds = since(2, 0.0)
    handling_byte_s: Seconds = since(2, 0.0)


class LinkProfile(Record):
    """One directed pair, over the path that training uses. ``error``: why there are no figures."""

    source: Name
    target: Name
    latency_s: Seconds | None = None
    bandwidth_bytes_per_s: Positive | None = None
    error: str | None = None


class LineProfile(Record):
    """What one node receives ("in") or sends ("out") with two peers at once, where they share one line.

    ``peers``: with whom it was measured. A node that is not listed was not seen to share a line.
    """

    node: Name
    direction: Literal["in", "out"]
    bandwidth_bytes_per_s: Positive
    peers: Seq[Name]


class LayerCosts(Record):
    """One layer at one microbatch size, counted from the real thing (see ``workload/costs.py``)."""

    name: Name
    signature: str
    flops: float = Field(ge=0)
    state_bytes: Bytes
    activation_bytes: Bytes
    output_bytes: Bytes
    workspace_bytes: Bytes
    deferred_bytes: Bytes = since(2, 0.0)


class ShapeProfile(Record):
    """The workload's layers at one microbatch size."""

    microbatch_size: Count
    microbatches: Count
    layers: Seq[LayerCosts]


class WorkloadProfile(Record):
    """The workload that was probed, at every microbatch size that may be chosen."""

    source: str
    digest: str
    batch_size: Count
    dtype: str
    shapes: Seq[ShapeProfile]


class NodeFailure(Record):
    """A node that could not be probed, and why."""

    node: Name
    error: str
    hint: str | None = None


class Profile(FileRecord):
    """A cluster as measured at one time."""

    kind: Literal["skyctl/profile"] = "skyctl/profile"
    version: Literal[2] = 2
    cluster: Name
    cluster_digest: str
    created: str
    nodes: Seq[NodeProfile]
    devices: Seq[DeviceProfile]
    links: Seq[LinkProfile]
    workload: WorkloadProfile | None = None
    failures: Seq[NodeFailure] = ()
    lines: Seq[LineProfile] = since(2, ())
