"""Measurements of nodes, devices, links, a workload's distinct layers on every device; and their quality."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from pydantic import Field

from skyctl.records.base import (
    Bytes,
    Count,
    FileRecord,
    Index,
    MatrixSize,
    Name,
    Positive,
    Record,
    Seconds,
    Seq,
)
from skyctl.records.problem import Tie

HANDLING_NEIGHBOURS = 4 / 3
"""Neighbours of a stage in a chain of three, on average: two links of two ends each."""

CONVERGED_INTERVAL = 0.03
"""Relative 95% interval above which a layer is shown as not known well enough."""


class NodeProfile(Record):
    """One node as found. ``cpus``: how many it may use, which is a fraction under a quota.

    ``skyctl``: the version that measured. ``site``: the name of its ``SiteProfile``. ``max_cpu_isa``: what
    ``ONEDNN_MAX_CPU_ISA`` had to be for the workload's dtype, because its processor advertises more than it
    can do; None: nothing had to. ``quota_period_s``: the period of its CPU quota, of which it may run for
    ``cpus`` times as long; None: no quota binds, or it was not told.
    """

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
    skyctl: str
    numa_nodes: Count | None
    site: str | None
    max_cpu_isa: str | None
    quota_period_s: Positive | None


class LayerTiming(Record):
    """One distinct layer at one microbatch size on one device.

    Seconds per microbatch (``optimizer_s``: per step). ``spread``: (p90 − p10) / median of the blocks
    measured. ``interval``: half the mean's 95% interval, relative to the mean. ``skipped``: why there are no
    figures. ``split_s``: the backward cut in two, both parts, and ``weight_s``: the part of it that only
    weight gradients need.
    """

    signature: str
    microbatch_size: Count
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    optimizer_s: Seconds | None = None
    spread: float | None = None
    repeats: Index = 0
    skipped: str | None = None
    weight_s: Seconds | None = None
    split_s: Seconds | None = None
    interval: float | None = None


class Conditions(Record):
    """The conditions under which a device was measured.

    ``wall_s``: how long that was watched. ``own_cpus``, ``others_cpus``: how many of the processors that it
    may use were taken by the probe and by other processes (None on an accelerator, or where the system does
    not say). ``share``: the part of the device that the probe could have, 1 where it was alone. ``notes``:
    what a reader of the figures should know, in words. ``stolen_share``: the part of its processors' time
    that the host of a virtual machine took (None: not told). ``halted_share``: the part of it in which they
    halted, in a virtual machine (None: it is none, or it was not told).
    """

    wall_s: Seconds
    own_cpus: float | None = None
    others_cpus: float | None = None
    share: float | None = None
    notes: Seq[str] = ()
    stolen_share: float | None = None
    halted_share: float | None = None


class MessageCosts(Record):
    """The costs of messages for a device over one backend; the fields are those of ``DeviceProfile``.

    ``ring_byte_s``: as ``message_byte_s``, in a ring that the backend's own collective sums over; None: not
    measured.
    """

    handling_s: Seconds
    handling_byte_s: Seconds
    step_s: Seconds
    message_byte_s: Seconds
    ring_byte_s: Seconds | None = None


class DeviceProfile(Record):
    """One device as measured. ``memory_bytes``: what a stage can use; ``reserved_bytes``: taken before it.

    ``handling_s``, ``handling_byte_s``: what a microbatch costs a stage here on top of its layers (messages,
    Python), and how much more for each byte of a message, with ``HANDLING_NEIGHBOURS`` others next to it.
    ``step_s``: what a step takes once, beside all of that. ``action_s``: what a microbatch's forward and
    backward take beyond their layers, whose times do not hold it.
    ``measured``: when its layers were (ISO; None: when the profile was made). ``fingerprint``: what must be
    the same for its timings to hold.
    ``reduce_byte_s``: processor seconds to add one byte of float32 gradient that was received to one's own.
    ``message_byte_s``: processor seconds to send, or to receive, one byte.
    ``gloo``: what messages cost over Gloo, where all other figures are of the backend ``skyctl``; None: not
    measured.
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
    handling_s: Seconds
    handling_byte_s: Seconds
    action_s: Seconds
    step_s: Seconds
    measured: str | None = None
    fingerprint: str | None = None
    conditions: Conditions | None = None
    reduce_byte_s: Seconds
    message_byte_s: Seconds
    gloo: MessageCosts | None


class LinkProfile(Record):
    """One directed pair, over the path that training uses. ``error``: why there are no figures.

    ``measured``: when (ISO; None: when the profile was made). ``estimated``: filled in from its sites' links.
    ``source_byte_s``, ``target_byte_s``: what a byte takes of a node's time to send and to receive, where
    that holds its layers up (a node under a CPU quota).
    """

    source: Name
    target: Name
    latency_s: Seconds | None = None
    bandwidth_bytes_per_s: Positive | None = None
    error: str | None = None
    measured: str | None = None
    estimated: bool = False
    source_byte_s: Seconds | None = None
    target_byte_s: Seconds | None = None


class LineProfile(Record):
    """The rate at which a node receives ("in") or sends ("out") with two peers at once, if they share a line.

    ``peers``: with whom it was measured. A node that is not listed was not seen to share a line.
    """

    node: Name
    direction: Literal["in", "out"]
    bandwidth_bytes_per_s: Positive
    peers: Seq[Name]


class SiteProfile(Record):
    """A site: nodes that are near to each other, as seen from all others."""

    name: Name
    nodes: Seq[Name] = Field(min_length=1)


class UplinkProfile(Record):
    """The rate at which a site's nodes together receive ("in") from all other sites or send ("out") to them.

    ``pairs``: the (source, target) flows it was measured with. A site that is not listed was not seen to
    share anything.
    """

    site: Name
    direction: Literal["in", "out"]
    bandwidth_bytes_per_s: Positive
    pairs: Seq[Seq[Name]]


class Observation(Record):
    """A run's figures for one device's layers, or for one link, beside those of the profile.

    ``seen``: when (ISO). ``steps``: how many went into the medians; ``spread``: p90 / p10 of the run's steps.
    A device: ``layers`` [start, stop) at ``microbatch_size`` of the workload ``digest``, seconds a step. A
    link: ``target`` given, seconds of one message of ``message_bytes``. ``probed_s`` is the probe's figure
    for the same, never one that an earlier observation has changed. ``layers_spread``: p90 / p10 of the
    device's own seconds in its layers, step by step. ``step_factors``: a device's, as a problem's device has
    them.
    """

    run_id: Name
    seen: str
    steps: Count
    spread: float
    device: Name
    target: Name | None = None
    digest: str
    microbatch_size: Count
    layers: Seq[Index] = ()
    message_bytes: Bytes | None = None
    probed_s: Positive
    seen_s: Positive
    layers_spread: float | None = None
    step_factors: Seq[Positive] = ()


class Remeasurement(Record):
    """A device, or the link to ``target``, measured again because a run contradicted the probe.

    ``seen``: when (ISO). ``factor``: seconds of its costliest layer, or of a byte, as measured then ÷ as
    probed.
    """

    seen: str
    device: Name
    target: Name | None = None
    factor: Positive


class LayerCosts(Record):
    """One layer at one microbatch size, counted from the real thing (see ``workload/costs.py``).

    ``gradient_bytes``: of its trained parameters' gradients in float32.
    ``gradient_matrices``: (rows, columns) of its trained parameters of two dimensions or more, rows being the
    first dimension. ``full_state_bytes``: ``state_bytes`` without adapters, if all were trained; None: there
    are none.
    """

    name: Name
    signature: str
    flops: float = Field(ge=0)
    state_bytes: Bytes
    activation_bytes: Bytes
    output_bytes: Bytes
    workspace_bytes: Bytes
    deferred_bytes: Bytes
    gradient_bytes: Bytes
    gradient_matrices: Seq[MatrixSize]
    full_state_bytes: Bytes | None = None


class ShapeProfile(Record):
    """The workload's layers at one microbatch size."""

    microbatch_size: Count
    microbatches: Count
    layers: Seq[LayerCosts]


CutVerdict = Literal["same", "unrepeatable", "not compared"]


class CutComparison(Record):
    """Whether the workload, cut into layers, trains what its own objects train in plain torch.

    ``verdict``: ``unrepeatable``: plain torch gives other numbers each time, so nothing can be told.
    ``reason``: why it is not ``same``, in words. ``device``: where it was found, by ``skyctl``'s version.
    """

    verdict: CutVerdict
    reason: str | None = None
    seconds: Seconds = 0.0
    device: Name | None = None
    skyctl: str | None = None

    @property
    def doubt(self) -> str | None:
        """The doubt that a run of it should be told; None: it trains as in plain torch."""
        return None if self.verdict == "same" else f"{self.verdict}: {self.reason}"


class WorkloadProfile(Record):
    """The workload that was probed, at every microbatch size that may be chosen.

    ``ties``: its layers that share trained parameters. ``comparison``: of its cut with the model itself.
    ``lora``: the adapters that alone are trained, as ``--lora`` takes them; None: the model is.
    """

    source: str
    digest: str
    batch_size: Count
    dtype: str
    shapes: Seq[ShapeProfile]
    ties: Seq[Tie]
    comparison: CutComparison
    lora: str | None = None


class NodeFailure(Record):
    """A node that could not be probed, and a sentence that says why."""

    node: Name
    error: str
    hint: str | None = None


class Profile(FileRecord):
    """A cluster as measured at one time. ``encrypted``: links and messages were measured through TLS.

    ``interrupted``: its probe was, before it had measured links: it serves later probes, and no plan.
    """

    kind: Literal["skyctl/profile"] = "skyctl/profile"
    version: Literal[13] = 13
    cluster: Name
    cluster_digest: str
    created: str
    nodes: Seq[NodeProfile]
    devices: Seq[DeviceProfile]
    links: Seq[LinkProfile]
    workload: WorkloadProfile | None = None
    failures: Seq[NodeFailure] = ()
    lines: Seq[LineProfile]
    sites: Seq[SiteProfile]
    uplinks: Seq[UplinkProfile]
    observations: Seq[Observation] = ()
    encrypted: bool
    remeasurements: Seq[Remeasurement] = ()
    interrupted: bool


def unconverged(timings: Sequence[LayerTiming], limit: float = CONVERGED_INTERVAL) -> list[LayerTiming]:
    """The timings of a device that are known less well than ``limit``; none that were skipped.

    A layer of next to nothing counts as known when its uncertainty is that small a part of the mean layer's
    time at its microbatch size.
    """
    means = {
        size: fmean(layer_time_s(t) for t in timings if t.microbatch_size == size and t.forward_s is not None)
        for size in {t.microbatch_size for t in timings if t.forward_s is not None}
    }
    return [
        timing
        for timing in timings
        if timing.forward_s is not None
        and (
            timing.interval is None
            or timing.interval * min(1.0, _time_share(layer_time_s(timing), means[timing.microbatch_size]))
            > limit
        )
    ]


def layer_time_s(timing: LayerTiming) -> float:
    """Seconds of a layer's forward and backward; 0 where it was skipped."""
    return (timing.forward_s or 0.0) + (timing.backward_s or 0.0)


def _time_share(own_s: float, mean_s: float) -> float:
    return own_s / mean_s if mean_s > 0 else 1.0
