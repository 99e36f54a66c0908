"""The planner's answer: which device holds which layers, the predicted time, and how certain that is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from skyctl.records.base import Bytes, Count, FileRecord, Index, Name, Record, Seconds, Seq, since
from skyctl.records.interval import Interval
from skyctl.records.problem import Problem

Strategy = Literal["even", "alone", "heuristic", "optimal", "assigned"]


class WorkloadRef(Record):
    """The workload that a plan was made for; ``batch_size`` in samples per step."""

    source: str
    digest: str
    batch_size: Count
    dtype: str
    seed: int


class Machine(Record):
    """A device as it was measured; launch refuses a plan whose devices have changed since.

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
    """One device's share of a stage: how many of a step's microbatches it gets, and keeps in flight.

    ``recompute``: keeps only its layers' inputs and computes the rest again in the backward.
    ``weights_behind``: under ``zero-bubble``, by how many microbatches weight gradients follow the backward.
    """

    device: Name
    microbatches: Count
    in_flight: Count
    recompute: bool = since(2, False)
    weights_behind: Index = since(2, 0)


class Stage(Record):
    """A stage of the pipeline: layers [start, stop), and the devices that hold them."""

    start: Index
    stop: Count
    replicas: Seq[Replica] = Field(min_length=1)

    @model_validator(mode="after")
    def _not_empty(self) -> Stage:
        if self.stop <= self.start:
            raise ValueError(f"a stage's range [{self.start}, {self.stop}) is empty")
        return self


class Unused(Record):
    """A device that the plan leaves out, and a sentence that says why."""

    device: Name
    reason: str


class ReplicaPrediction(Record):
    """The prediction of one step on one device: busy and idle seconds, and peak memory."""

    device: Name
    compute_s: Seconds
    idle_s: Seconds
    memory_bytes: Bytes


class Prediction(Record):
    """The simulator's prediction of one step. ``bottleneck_s``: the largest stage's Σ(forward + backward).

    ``interval``: of ``iteration_s``; None where the problem does not say how sure its figures are.
    """

    iteration_s: Seconds
    bottleneck_s: Seconds
    replicas: Seq[ReplicaPrediction]
    interval: Interval | None = since(7, None)


class Witness(Record):
    """Dual prices that prove a certificate's bound, evaluated by ``verify`` (``proof_by_witness``).

    Attributes:
        layer_prices: one per layer, of any sign.
        place_prices: one per place in a pipeline, from the last stage on, none negative; 0 beyond them.
    """

    layer_prices: Seq[float] = Field(min_length=1)
    place_prices: Seq[Annotated[float, Field(ge=0)]] = ()


ProofStatus = Literal["optimal", "bounded", "feasible"]


class WholeBlocksProof(Record):
    """What is proved among plans that cut between transformer blocks only; fields as in ``Certificate``."""

    status: ProofStatus
    lower_bound_s: Seconds | None
    method: str


class Certificate(Record):
    """How sure: ``value_s`` and ``lower_bound_s`` in the problem's objective; gap = value / bound − 1.

    ``optimal``: proved, gap ≤ 1e-9. ``bounded``: a valid lower bound. ``feasible``: no bound claimed.
    ``whole_blocks``: set where only plans that cut between transformer blocks were searched.
    """

    status: ProofStatus
    value_s: Seconds
    lower_bound_s: Seconds | None
    gap: float | None
    method: str
    wall_s: Seconds
    witness: Witness | None = since(6, None)
    whole_blocks: WholeBlocksProof | None = since(6, None)


class Contradiction(Record):
    """A run that saw a device, or the link to ``target``, much slower than is known: not planned with.

    ``seen``: when (ISO). ``factor``: seconds as seen ÷ as probed; ``believed``: the same of what the plan
    reckons with.
    """

    run_id: Name
    seen: str
    device: Name
    target: Name | None = None
    factor: float
    believed: float


class Plan(FileRecord):
    """An envelope (problem, prediction, certificate) around a form; this form is stages × replicas.

    ``encrypted``: its links were measured through TLS, and it is run so. ``contradictions``: what runs saw
    and nothing has settled yet; the next launch or comparison of the workload measures those nodes again.
    """

    kind: Literal["skyctl/plan"] = "skyctl/plan"
    version: Literal[7] = 7
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
    contradictions: Seq[Contradiction] = since(7, ())

    def version_of_values(self) -> int:
        """7 where one device alone is the strategy, which older versions do not know."""
        return 7 if self.strategy == "alone" else 1

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
