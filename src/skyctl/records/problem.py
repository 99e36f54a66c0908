"""The planner's question: layers, devices, links. Model of time and memory: ``docs/contract.md``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from skyctl.records.base import Bytes, Count, FileRecord, Index, Name, Positive, Record, Seconds, Seq

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
        for field in ("first_stage", "last_stage"):
            for device in getattr(self, field) or ():
                _need(device, known, field)
        return self


def _need(device: str, known: set[str], where: str) -> None:
    if device not in known:
        raise ValueError(f"{where} names device {device!r}, which is not in devices")
