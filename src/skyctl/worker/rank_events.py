"""The events that a rank tells the launcher: one frozen record for each kind, read by ``agent.task_events``.

In this order: its environment, before it builds anything; what it stores for other ranks, and waits for from
them; that it is ready; then for every step one ``StepEvent``, validations and checkpoints between them, and
all the while a heartbeat every few seconds. Needs the standard library only: the launcher reads them without
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from skyctl.agent.message_fields import (
    AnyNumber,
    Bytes,
    Index,
    Label,
    Matches,
    MaxLength,
    Seconds,
    Within,
)
from skyctl.checkpoint.node.replicator_events import ShardDigest
from skyctl.worker.member_messages import Accept, Prepare
from skyctl.workload.validation_metrics import MAX_METRICS, METRIC_NAME

CONNECT_PHASE = "connect"
"""The phase of a rank that waits for its neighbours."""
StoreKey = Annotated[str, MaxLength(200)]
StoreValue = Annotated[str, Matches("([0-9a-f]{2}){0,4096}")]
RESTORE_PHASE = "reading the checkpoint"
"""The phase of a rank that reads its layers' files."""
MetricName = Annotated[str, Matches(METRIC_NAME)]
Numel = Annotated[int, Within(0, 1 << 40)]
"""How many numbers tensors have: of a large model's embedding hundreds of millions."""


@dataclass(frozen=True)
class EnvironmentEvent:
    """The rank's findings where it was sent, for the launcher to compare with what its plan was made for.

    ``device_name``: None where the device is not there or can't be used; ``devices`` are those that are, and
    its memory is then None too. ``memory_bytes``: free now. ``memory_scope``: names the memory that several
    devices draw from (``node_environment.device_memory``). ``own_bytes``: held by this process already.
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
class RoomEvent:
    """The rank's place among those of other runs, too, that wait for memory on its device.

    ``place``: from 1, and each time a lower one; 0: it has its memory, and waits to build.
    """

    kind: ClassVar[str] = "room"
    place: Index


@dataclass(frozen=True)
class StoredEvent:
    """A key that the rank sets for all, in the store over which ranks find each other; ``value``: in hex."""

    kind: ClassVar[str] = "stored"
    key: StoreKey
    value: StoreValue


@dataclass(frozen=True)
class KeyWantedEvent:
    """A key whose value the rank waits for: it is told as soon as a rank has set it."""

    kind: ClassVar[str] = "wanted"
    key: StoreKey


@dataclass(frozen=True)
class SumSizes:
    """How many numbers ranks sum, which is all that a helper is told of the model.

    ``layers``: of the gradients of each layer, in the order in which they are summed; ``parameters``: how
    many parameters these are of; ``figures``: of batch norms' running figures. ``first``, ``second``: with
    ``powersgd:R``, by layer, of each pass of a compressed step; empty: gradients are summed whole.
    """

    layers: tuple[Numel, ...]
    parameters: Index
    figures: Index
    first: tuple[Numel, ...] = ()
    second: tuple[Numel, ...] = ()


@dataclass(frozen=True)
class TensorSketch:
    """A few numbers of one tensor, keyed by seed and step (``worker.batch_sketch``).

    ``whole``: of whole numbers, their sum with random weights, modulo 2**64; None for floats. Of floats
    ``sums`` with random signs, and their ``norm`` (2-norm). Without either it could not be looked at.
    """

    whole: int | None = None
    norm: float = 0.0
    sums: Annotated[tuple[float, ...], MaxLength(16)] = ()


LayerSketches = Mapping[int, Annotated[tuple[TensorSketch, ...], MaxLength(1000)]]
"""By layer, the sketch of each of its parameters."""


@dataclass(frozen=True)
class ReadyEvent:
    """The rank is connected to its neighbours, and has built its stage, unless it only helps others to sum.

    ``sums``: of a rank that sums gradients with other pipelines. ``sketches``: of such a rank, by layer, its
    parameters as they are before the first step.
    """

    kind: ClassVar[str] = "ready"
    sums: SumSizes | None = None
    sketches: LayerSketches = field(default_factory=dict)


@dataclass(frozen=True)
class HeartbeatEvent:
    """The rank is alive. ``phase``: what it is at; ``waiting``: it only waits for another rank."""

    kind: ClassVar[str] = "alive"
    phase: Label
    waiting: bool


@dataclass(frozen=True)
class BatchSketch:
    """The sketch that one end of the pipeline makes of its batch, to be compared with the other end's.

    ``epoch``, ``index``: where in the epochs of data() it comes from, counted from 0; None for built-in data.
    ``length``: batches of an epoch, where data() says so. ``finite_inputs``, ``finite_targets``: nothing in
    them is NaN or infinite. ``repeats``: the second epoch begins as the first did. ``inputs``, ``targets``:
    by tensor; () where they are not compared. ``is_part``: of its pipeline's samples alone.
    """

    epoch: Index | None = None
    index: Index | None = None
    length: Index | None = None
    finite_inputs: bool = True
    finite_targets: bool = True
    repeats: bool = False
    is_part: bool = False
    inputs: Annotated[tuple[TensorSketch, ...], MaxLength(1000)] = ()
    targets: Annotated[tuple[TensorSketch, ...], MaxLength(1000)] = ()


@dataclass(frozen=True)
class StepEvent:
    """One rank's figures of one step.

    ``iteration_s``: from the step's start to the next one's (the last step: to its end), validation left out;
    ``compute_s + transfer_s + idle_s`` of it. ``compute_s``: all that is not waiting, so it also holds what
    the rank does beside its layers. ``transfer_s``, ``idle_s``: waiting for the network, and for other stages
    (``worker.messages``). ``sync_s``: of both, from this rank's last backward to the end of the gradients'
    sum over pipelines; None: there is one pipeline. ``repeats``: how often its microbatches were made again,
    as a gradient did not fit ``fixed32``'s exponents; counted in all seconds. ``forward_s``, ``backward_s``,
    ``weight_s``, ``optimizer_s``: in the layers, over all microbatches of its pipeline. ``input_message_s``,
    ``gradient_message_s``: median seconds on the way of messages that were waited for from before their
    start; None: there was none. ``loss``: on the last stage, its pipeline's part of the batch's mean;
    of ranks that may leave (``worker.elastic``), the whole mean.
    ``grad_norm``: over all stages, before clipping; None without clipping. ``learning_rate``: None for a
    stage that trains nothing. ``validates``: a validation follows on this rank's pipeline. ``samples``: of
    its pipeline's microbatches. ``ahead``: with a parameter server, by how many steps it was ahead of the
    slowest worker when it might go on. ``batch``: at both ends of the pipeline;
    ``validation_batch``: with the first step, of the first held-out batch. If a step is a round,
    ``local_steps``: those made in it; ``samples``: that count in the average; ``own_loss``: on the last
    stage, the mean loss of its pipeline's local steps, which ``loss`` has the part of the whole of.
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
    batch: BatchSketch | None = None
    validation_batch: BatchSketch | None = None
    sync_s: Seconds | None = None
    repeats: Index = 0
    ahead: Index | None = None
    local_steps: Index | None = None
    own_loss: Annotated[float, AnyNumber()] | None = None


@dataclass(frozen=True)
class ValidationEvent:
    """The validation loss after a step, from the last stage. ``wall_s``: what the validation took.

    ``samples``: that it is of.
    ``metrics``: by name, the means of the user's metrics (None: no number); None: there are none.
    """

    kind: ClassVar[str] = "validation"
    step: Index
    loss: Annotated[float, AnyNumber()]
    wall_s: Seconds
    metrics: Annotated[Mapping[MetricName, float | None], MaxLength(MAX_METRICS)] | None = None
    samples: Index = 0


@dataclass(frozen=True)
class CheckpointEvent:
    """The rank has written its layers after ``step`` steps.

    ``layers``: by layer, its file; empty where another pipeline writes it. ``error``: why there is none.
    ``notes``: what could not be kept exactly. ``sketches``: by layer, of each parameter, where several
    pipelines hold it.
    """

    kind: ClassVar[str] = "checkpoint"
    step: Index
    layers: Mapping[int, ShardDigest]
    wall_s: Seconds
    notes: Annotated[tuple[Label, ...], MaxLength(1000)] = ()
    error: Annotated[str, MaxLength(5000)] | None = None
    sketches: LayerSketches = field(default_factory=dict)


@dataclass(frozen=True)
class MembersEvent:
    """Ranks have agreed on who makes steps together from now on (``worker.elastic``).

    ``number``: of the generation. ``members``: its ranks. ``step``: the first that they end together.
    """

    kind: ClassVar[str] = "members"
    number: Index
    members: tuple[Index, ...]
    step: Index


@dataclass(frozen=True)
class WitnessAskedEvent:
    """A rank asks the launcher, as the witness of half of the members, to promise or accept: one of both."""

    kind: ClassVar[str] = "witness"
    prepare: Prepare | None = None
    accept: Accept | None = None


@dataclass(frozen=True)
class TokenEvent:
    """The next token, of the last rank of those that generate."""

    kind: ClassVar[str] = "token"
    token: Index


@dataclass(frozen=True)
class RankResult:
    """The rank has trained to its end.

    ``weights``, ``trace``: its files on the node; None where none was asked for. ``steps``: those done.
    ``ended_by``: the rank that told it that the run ends; None: nobody but the launcher has.
    ``stopped_early``: this rank has ended the run, as validations were no better (``Recipe.patience``).
    ``experts``: what it has seen of experts on hosts (``experts.trunk_experts``); None: it has none there.
    """

    kind: ClassVar[str] = "result"
    steps: Index
    weights: str | None = None
    trace: str | None = None
    peak_memory_bytes: Bytes | None = None
    ended_by: Index | None = None
    stopped_early: bool = False
    experts: Any = None


RankEvent = (
    EnvironmentEvent
    | RoomEvent
    | StoredEvent
    | KeyWantedEvent
    | ReadyEvent
    | HeartbeatEvent
    | StepEvent
    | ValidationEvent
    | CheckpointEvent
    | MembersEvent
    | WitnessAskedEvent
    | RankResult
)
RANK_EVENTS: tuple[type[RankEvent], ...] = (
    EnvironmentEvent,
    RoomEvent,
    StoredEvent,
    KeyWantedEvent,
    ReadyEvent,
    HeartbeatEvent,
    StepEvent,
    ValidationEvent,
    CheckpointEvent,
    MembersEvent,
    WitnessAskedEvent,
    RankResult,
)
