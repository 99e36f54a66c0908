"""What a rank tells the launcher: one frozen record for each kind of event, read by ``agent.task_events``.

In this order: its environment, before it builds anything; where it listens (a rank with a successor); that it
is ready; then for every step one ``StepEvent``, validations and checkpoints between them, and all the while a
heartbeat every few seconds. Needs the standard library only: the launcher reads them without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from skyctl.agent.event_fields import (
    Address,
    AnyNumber,
    ByteCount,
    Bytes,
    Index,
    Label,
    Matches,
    MaxLength,
    Port,
    Seconds,
    Sha256,
    Within,
)
from skyctl.workload.validation_metrics import MAX_METRICS, METRIC_NAME

CONNECT_PHASE = "connect"
"""The phase of a rank that waits for its neighbours."""
RESTORE_PHASE = "reading the checkpoint"
"""The phase of a rank that reads its layers' files."""
MetricName = Annotated[str, Matches(METRIC_NAME)]


@dataclass(frozen=True)
class EnvironmentEvent:
    """What the rank found where it was sent, for the launcher to compare with what its plan was made for.

    ``device_name``: None where the device is not there or can't be used; ``devices`` are those that are, and
    its memory is then None too. ``memory_bytes``: free now. ``memory_scope``: names the memory that several
    devices draw from (``node_facts.device_memory``). ``own_bytes``: held by this process already.
    """

    kind: ClassVar[str] = "facts"
    device_name: Label | None
    devices: Annotated[tuple[Label, ...], MaxLength(1000)]
    cpu_model: Label
    cpus: Annotated[float, Within(0.0, 1e6)]
    threads: Annotated[int, Within(0, 10**6)]
    python: Label
    torch: Label
    memory_bytes: Bytes | None
    memory_scope: Label | None
    own_bytes: Bytes


@dataclass(frozen=True)
class ListeningEvent:
    """The address at which the rank waits for its successor."""

    kind: ClassVar[str] = "listening"
    address: Address
    port: Port


@dataclass(frozen=True)
class ReadyEvent:
    """The rank has built its stage and is connected to its neighbours."""

    kind: ClassVar[str] = "ready"


@dataclass(frozen=True)
class HeartbeatEvent:
    """The rank is alive. ``phase``: what it is at; ``waiting``: it only waits for another rank."""

    kind: ClassVar[str] = "alive"
    phase: Label
    waiting: bool


@dataclass(frozen=True)
class StepEvent:
    """One rank's figures of one step.

    ``iteration_s``: from the step's start to the next one's (the last step: to its end), validation left out;
    ``compute_s + transfer_s + idle_s`` of it. ``compute_s``: all that is not waiting, so it also holds what
    the rank does beside its layers. ``transfer_s``, ``idle_s``: waiting for the network, and for other stages
    (``worker.messages``). ``forward_s``, ``backward_s``, ``weight_s``, ``optimizer_s``: in the layers, over
    all microbatches. ``input_message_s``, ``gradient_message_s``: median seconds on the way of messages that
    were waited for from before their start; None: there was none. ``loss``: on the last stage. ``grad_norm``:
    over all stages, before clipping; None without clipping. ``learning_rate``: None for a stage that trains
    nothing. ``validates``: a validation follows.
    """

    kind: ClassVar[str] = "step"
    step: Index
    iteration_s: Seconds
    compute_s: Seconds
    transfer_s: Seconds
    idle_s: Seconds
    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds | None
    optimizer_s: Seconds
    input_message_s: Seconds | None
    gradient_message_s: Seconds | None
    loss: Annotated[float, AnyNumber()] | None
    grad_norm: Annotated[float, AnyNumber()] | None
    learning_rate: float | None
    validates: bool
    samples: Index
    peak_memory_bytes: Bytes | None


@dataclass(frozen=True)
class ValidationEvent:
    """The validation loss after a step, from the last stage. ``wall_s``: what the validation took.

    ``metrics``: by name, the means of the user's metrics (None: no number); None: there are none.
    """

    kind: ClassVar[str] = "validation"
    step: Index
    loss: Annotated[float, AnyNumber()]
    wall_s: Seconds
    metrics: Annotated[Mapping[MetricName, float | None], MaxLength(MAX_METRICS)] | None = None


@dataclass(frozen=True)
class WrittenShard:
    """One layer's file of a checkpoint."""

    sha256: Sha256
    bytes: ByteCount


@dataclass(frozen=True)
class CheckpointEvent:
    """The rank has written its layers after ``step`` steps.

    ``layers``: by layer, its file. ``error``: why there is none. ``notes``: what could not be kept exactly.
    """

    kind: ClassVar[str] = "checkpoint"
    step: Index
    layers: Mapping[int, WrittenShard]
    wall_s: Seconds
    notes: Annotated[tuple[Label, ...], MaxLength(1000)] = ()
    error: Annotated[str, MaxLength(5000)] | None = None


@dataclass(frozen=True)
class RankResult:
    """The rank has trained to its end.

    ``weights``, ``trace``: its files on the node; None where none was asked for. ``steps``: those done.
    """

    kind: ClassVar[str] = "result"
    steps: Index
    weights: str | None = None
    trace: str | None = None
    peak_memory_bytes: Bytes | None = None


RankEvent = (
    EnvironmentEvent
    | ListeningEvent
    | ReadyEvent
    | HeartbeatEvent
    | StepEvent
    | ValidationEvent
    | CheckpointEvent
    | RankResult
)
RANK_EVENTS: tuple[type[RankEvent], ...] = (
    EnvironmentEvent,
    ListeningEvent,
    ReadyEvent,
    HeartbeatEvent,
    StepEvent,
    ValidationEvent,
    CheckpointEvent,
    RankResult,
)
