"""The planner's answer: who holds which layers, what that should take, and how sure that is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from skyctl.records.base import Bytes, Count, FileRecord, Index, Name, Record, Seconds, Seq, since
from skyctl.records.problem import Problem

Strategy = Literal["even", "heuristic", "optimal", "assigned"]


class WorkloadRef(Record):
    """Which workload a plan was made for; ``batch_size`` in samples a step."""

    source: str
    digest: str
    batch_size: Count
    dtype: str
    seed: int


class Machine(Record):
    """What a device was when it was measured: launch refuses a plan whose devices are others by now.

    ``cpus``: processors it may use, a fraction under a quota; ``threads``: of a CPU device.
    """

    device: Name
    name: str
    cpu_model: str
    cpus: float
    threads: Count | None
    python: str
    torch: str


class Replica(Record):
    """One device's share of a stage: that many of the step's microbatches, that many kept in flight.

    ``recompute``: keeps only its layers' inputs and computes the rest again in the backward.
    ``weights_behind``: under ``zero-bubble``, by how many microbatches weight gradients follow the backward.
    """

    device: Name
    microbatches: Count
    in_flight: Count
    recompute: bool = since(2, False)
    weights_behind: Index = since(2, 0)


class Stage(Record):
    """Layers [start, stop), half-open."""

    start: Index
    stop: Count
    replicas: Seq[Replica] = Field(min_length=1)

    @model_validator(mode="after")
    def _not_empty(self) -> Stage:
        if self.stop <= self.start:
            raise ValueError(f"a stage's range [{self.start}, {self.stop}) is empty")
        return self


class Unused(Record):
    """A device left out, and why."""

    device: Name
    reason: str


class ReplicaPrediction(Record):
    """One step on one device: busy, idle, and the most memory it holds."""

    device: Name
    compute_s: Seconds
    idle_s: Seconds
    memory_bytes: Bytes


class Prediction(Record):
    """What the simulator says of one step. ``bottleneck_s``: the largest stage's Σ(forward + backward)."""

    iteration_s: Seconds
    bottleneck_s: Seconds
    replicas: Seq[ReplicaPrediction]


class Certificate(Record):
    """How sure: ``value_s`` and ``lower_bound_s`` in the problem's objective; gap = value / bound − 1.

    ``optimal``: proved, gap ≤ 1e-9. ``bounded``: a valid lower bound. ``feasible``: no bound claimed.
    """

    status: Literal["optimal", "bounded", "feasible"]
    value_s: Seconds
    lower_bound_s: Seconds | None
    gap: float | None
    method: str
    wall_s: Seconds


class Plan(FileRecord):
    """An envelope (problem, prediction, certificate) around a form; this form is stages × replicas.

    ``encrypted``: its links were measured through TLS, and it is run so.
    """

    kind: Literal["skyctl/plan"] = "skyctl/plan"
    version: Literal[5] = 5
    form: Literal["grid"] = "grid"
    strategy: Strategy
    problem: Problem
    workload: WorkloadRef | None = None
    stages: Seq[Stage] = Field(min_length=1)
    unused: Seq[Unused] = ()
    predicted: Prediction
    certificate: Certificate
    machines: Seq[Machine] = since(3, ())
    encrypted: bool = since(4, False)

    @model_validator(mode="after")
    def _covers(self) -> Plan:
        at = 0
        seen: set[str] = set()
        for stage in self.stages:
            if stage.start != at:
                raise ValueError(f"stages must follow each other: one starts at {stage.start}, expected {at}")
            at = stage.stop
            for replica in stage.replicas:
                if replica.device in seen:
                    raise ValueError(f"device {replica.device!r} holds more than one stage")
                seen.add(replica.device)
        if at != len(self.problem.layers):
            raise ValueError(f"stages cover {at} layers, the problem has {len(self.problem.layers)}")
        if seen != {replica.device for replica in self.predicted.replicas}:
            raise ValueError("predicted.replicas must name the devices that hold a stage")
        unknown = seen - {device.id for device in self.problem.devices}
        if unknown:
            raise ValueError(f"stages name device {sorted(unknown)[0]!r}, which is not in the problem")
        return self
