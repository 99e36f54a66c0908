"""The planner's question: layers, devices, links. Model of time and memory: ``docs/contract.md``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from skyctl.records.base import Bytes, Count, FileRecord, Index, Name, Positive, Record, Seconds, Seq

LARGEST = 1e300
"""Totals above this (seconds of a step, bytes of the model) overflow when computed with."""
MOST_MICROBATCHES = 1_000_000
NAMED = 12
"""So many of the devices there are are listed where one is named that is not."""

Schedule = Literal["sequential", "gpipe", "1f1b", "eager-1f1b"]
Objective = Literal["iteration", "bottleneck"]


class Layer(Record):
    """One layer, per microbatch. ``flops``: forward and backward together."""

    name: Name
    flops: float = Field(ge=0)
    state_bytes: Bytes
    activation_bytes: Bytes
    output_bytes: Bytes
    workspace_bytes: Bytes = 0.0


class Device(Record):
    """One device. ``memory_bytes`` None: unlimited."""

    id: Name
    flops_per_s: Positive
    memory_bytes: Bytes | None
    reserved_bytes: Bytes = 0.0


class LayerTimes(Record):
    """Measured seconds per layer on one device; ``optimizer_s`` once a step, the others per microbatch."""

    forward_s: Seq[Seconds]
    backward_s: Seq[Seconds]
    optimizer_s: Seq[Seconds]


class Link(Record):
    """A directed link. A missing one is free."""

    source: Name
    target: Name
    latency_s: Seconds
    bandwidth_bytes_per_s: Positive


class SharedResource(Record):
    """What several links share (an uplink, a NIC): every message over one of ``links`` occupies it."""

    name: Name
    bandwidth_bytes_per_s: Positive
    links: Seq[Seq[Name]]


class Problem(FileRecord):
    """Everything a plan depends on, and nothing else."""

    kind: Literal["skyctl/problem"] = "skyctl/problem"
    version: Literal[1] = 1
    layers: Seq[Layer] = Field(min_length=1)
    devices: Seq[Device] = Field(min_length=1)
    times: dict[str, LayerTimes] = Field(default_factory=dict)
    links: Seq[Link] = ()
    shared: Seq[SharedResource] = ()
    first_stage: Seq[Name] | None = None
    last_stage: Seq[Name] | None = None
    microbatches: Count
    receive_window: Index = 0
    schedule: Schedule = "1f1b"
    objective: Objective = "iteration"

    @model_validator(mode="after")
    def _consistent(self) -> Problem:
        ids = [device.id for device in self.devices]
        known = set(ids)
        if len(known) != len(ids):
            raise ValueError(f"duplicate device {next(i for i in ids if ids.count(i) > 1)!r}")
        for device, times in self.times.items():
            _need(device, known, "times")
            for field in ("forward_s", "backward_s", "optimizer_s"):
                if len(getattr(times, field)) != len(self.layers):
                    raise ValueError(
                        f"times of {device!r}: {field} has {len(getattr(times, field))} values "
                        f"for {len(self.layers)} layers"
                    )
        pairs: set[tuple[str, str]] = set()
        for link in self.links:
            _need(link.source, known, "links")
            _need(link.target, known, "links")
            if link.source == link.target:
                raise ValueError(f"a link of {link.source!r} to itself")
            if (link.source, link.target) in pairs:
                raise ValueError(f"duplicate link {link.source!r} → {link.target!r}")
            pairs.add((link.source, link.target))
        for resource in self.shared:
            for pair in resource.links:
                if len(pair) != 2:
                    raise ValueError(
                        f"shared {resource.name!r}: a link is [source, target], not {list(pair)}"
                    )
                for end in pair:
                    _need(end, known, f"shared {resource.name!r}")
                if pair[0] == pair[1]:
                    raise ValueError(f"shared {resource.name!r}: a link of {pair[0]!r} to itself")
        for field in ("first_stage", "last_stage"):
            for device in getattr(self, field) or ():
                _need(device, known, field)
        _computable(self)
        return self


def _need(device: str, known: set[str], where: str) -> None:
    if device not in known:
        there = sorted(known)
        more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
        raise ValueError(
            f"{where} names device {device!r}, which is not in devices: {', '.join(there[:NAMED])}{more}"
        )


def _computable(problem: Problem) -> None:
    """Raises ValueError where sums and quotients of the problem's numbers are too large for a float."""
    m = problem.microbatches
    for field in ("microbatches", "receive_window"):
        if getattr(problem, field) > MOST_MICROBATCHES:
            raise ValueError(f"{field} may be at most {MOST_MICROBATCHES}")
    flops = sum(layer.flops for layer in problem.layers)
    for device in problem.devices:
        times = problem.times.get(device.id)
        if times is None:
            seconds = flops / device.flops_per_s
        else:
            seconds = sum(times.forward_s) + sum(times.backward_s) + sum(times.optimizer_s)
        if m * seconds > LARGEST:
            raise ValueError(
                f"device {device.id!r}: a step of all layers takes {m * seconds:.3g} s: too large"
            )
    largest = max(layer.output_bytes for layer in problem.layers)
    ways = [
        (f"link {k.source!r} → {k.target!r}", k.bandwidth_bytes_per_s, k.latency_s) for k in problem.links
    ]
    ways += [(f"shared {s.name!r}", s.bandwidth_bytes_per_s, 0.0) for s in problem.shared]
    for name, bandwidth, latency_s in ways:
        seconds = max(largest, 1.0) / bandwidth + latency_s
        if 2 * m * len(problem.layers) * seconds > LARGEST:
            raise ValueError(f"{name}: a message takes {seconds:.3g} s: too large")
    each = (
        layer.state_bytes + m * layer.activation_bytes + layer.workspace_bytes + layer.output_bytes
        for layer in problem.layers
    )
    if max(1, 2 * problem.receive_window) * sum(each) > LARGEST:
        raise ValueError("the layers' bytes add up to more than can be computed with")
