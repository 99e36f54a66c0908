"""The launcher's orders to ranks: frozen records, checked where they arrive (``agent.task_orders``).

A rank that holds layers gets a ``RankOrder``, one that only helps others to sum a ``HelperOrder``, one that
generates text a ``GenerationOrder``.
``run.rank_spec`` makes them. Needs the standard library only: the launcher makes orders without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from skyctl.agent.message_fields import (
    ByteCount,
    Bytes,
    Count,
    DeviceName,
    Index,
    Label,
    MaxLength,
    Seconds,
    Sha256,
    Within,
)
from skyctl.transport.tls_identity import TlsIdentity
from skyctl.worker.expert_orders import ExpertsOrder
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec

IndexRange = tuple[Index, Index]
"""From the first one to the one behind the last."""
Ranks = tuple[Index, ...]
Secret = Annotated[str, MaxLength(200)]
MEMBER_PURPOSE, SUM_PURPOSE = "member", "sum"
"""Of the connections that ranks of elastic runs have beside those of their pipeline."""


@dataclass(frozen=True)
class WorldOrder:
    """A rank's place among all ranks of an attempt, and the ranks that it talks to.

    Attributes:
        ranks: how many there are, with those that help.
        backend: what carries tensors between ranks.
        interface: the network interface to use; None: the one on the route to each peer.
        hosts: by rank, the address of each peer.
        before, after: the ranks of the neighbouring stages; None at the pipeline's ends.
        clock_of: the rank with whose clock this one compares its own for a trace; None: the first rank's.
        clock_for: the ranks that compare theirs with this one's.
        timeout_s: the longest that this rank waits for a peer.
        secrets: by rank, what this rank shares with that peer alone; empty until the order is sent.
        tls: the run's certificate and key; None: nothing between ranks is encrypted.
    """

    rank: Index
    ranks: Count
    backend: Label
    interface: Label | None
    hosts: Mapping[int, Label]
    before: Index | None
    after: Index | None
    clock_of: Index | None
    clock_for: Ranks
    timeout_s: Seconds
    secrets: Mapping[int, Secret] = field(default_factory=dict, repr=False)
    tls: TlsIdentity | None = None


@dataclass(frozen=True)
class RoutePlace:
    """A rank's place on one route; its peers there are ranks. A helper may be on one way only, or on none.

    Attributes:
        share: of the numbers, that this route sums.
        up_children: whose partial sums it adds, in this order.
        up_parent: whom it sends its own to; None at the root, and where it is not on the way up.
        down_parent: who sends it the sum; None at the root, and where it is not on the way down.
        down_children: whom it sends the sum on to.
    """

    share: Annotated[float, Within(0.0, 1.0)]
    up_children: Ranks
    up_parent: Index | None
    down_parent: Index | None
    down_children: Ranks

    @property
    def adds(self) -> bool:
        """Whether it is on the way up, or the root."""
        return self.up_parent is not None or (self.down_parent is None and bool(self.up_children))

    @property
    def peers(self) -> frozenset[int]:
        """The ranks that the route joins this one with."""
        ends = (self.up_parent, self.down_parent, *self.up_children, *self.down_children)
        return frozenset(end for end in ends if end is not None)


@dataclass(frozen=True)
class SumGroupOrder:
    """A rank's part in the sums of one group: of some layers, or of the parameters that layers share.

    Attributes:
        number: the group's, in the plan.
        first_tag: the first of the tags of its messages, which no other group has.
        routes: the rank's place on each of the group's routes.
        start, stop: the layers [start, stop) whose gradients or weights are summed; of a tie (0, 0).
        tie: the layers that share the parameters; None: the group is of layers.
        agreement: the place on the tree over which ranks agree; None: that on the first route.
        ring: the ranks in the order in which the backend's own collective sums; None: the routes do.
    """

    number: Index
    first_tag: Index
    routes: tuple[RoutePlace, ...]
    start: Index = 0
    stop: Index = 0
    tie: tuple[Index, ...] | None = None
    agreement: RoutePlace | None = None
    ring: Ranks | None = None


@dataclass(frozen=True)
class Staleness:
    """Weights are a parameter server's. ``most``: clocks that a worker may be ahead; None: any number."""

    most: Index | None


@dataclass(frozen=True)
class SumOrder:
    """The sums that a rank takes part in.

    Attributes:
        format: what the numbers are sent as (``worker.sum_codecs``).
        chunk_bytes: the most bytes of numbers in a message, in that format.
        groups: in the plan's order.
        uncompressed_steps: with ``powersgd:R``, so many at the run's start are summed whole.
        delay: whether gradients of a step take effect one step later.
        undelayed_steps: so many at the run's start do not.
        staleness: None: no parameter server.
    """

    format: Label
    chunk_bytes: ByteCount
    groups: tuple[SumGroupOrder, ...]
    uncompressed_steps: Index = 0
    delay: bool = False
    undelayed_steps: Index = 0
    staleness: Staleness | None = None

    @property
    def ring(self) -> Ranks | None:
        """The ranks in the order in which the backend's own collective sums; None: there is no such sum."""
        return next((group.ring for group in self.groups if group.ring is not None), None)

    @property
    def peers(self) -> list[int]:
        """The ranks that it sums with, in their order."""
        return sorted({peer for group in self.groups for route in group.routes for peer in route.peers})


@dataclass(frozen=True)
class LinkDtypes:
    """The dtypes in which floats of a stage's four streams are sent; None: as they are."""

    to_next: Label | None = None
    from_next: Label | None = None
    to_previous: Label | None = None
    from_previous: Label | None = None


@dataclass(frozen=True)
class RoundOptions:
    """The rounds that a rank makes: local steps, then an average of weights.

    Attributes:
        steps: local steps of this rank's pipeline in a round.
        owner: what this rank's owner is called; None: pipelines share each batch.
        index, owners: the owner's place among all, and how many there are.
        prox_mu: µ of FedProx's proximal term; 0: without it.
        outer_lr, outer_momentum: of the outer step; 1 and 0: the weights become the average itself.
        clients: how many owners take part in each round; None: all.
        drop_stragglers: work of fewer steps than asked is left out of the average.
        deadline_s: seconds of a round after which its owner begins no further local step; None: no limit.
    """

    steps: Index
    owner: Label | None = None
    index: Index = 0
    owners: Count = 1
    prox_mu: float = 0.0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    clients: Count | None = None
    drop_stragglers: bool = False
    deadline_s: Seconds | None = None


@dataclass(frozen=True)
class Unlike:
    """Why replicas would not call the same collectives in a step.

    Attributes:
        reason: a key of ``worker.replicas.REASONS``.
        figures: of each pipeline, what differs; empty where nothing is counted.
    """

    reason: Label
    figures: tuple[Label, ...] = ()


@dataclass(frozen=True)
class ReplicaOrder:
    """The ranks that hold the same layers, for ``skyctl.replicas()``.

    Attributes:
        ranks: all of them, in order, with this one.
        address: at which the others reach this rank's machine.
        unlike: why a collective would wait for ever; None: it would not.
        secret: what they share, and nobody else; empty until the order is sent.
    """

    ranks: Ranks
    address: Label
    unlike: Unlike | None = None
    secret: Secret = field(default="", repr=False)


@dataclass(frozen=True)
class RouteTree:
    """The whole of one route, as all ranks know it that may have to go on without one of them.

    Attributes:
        share: of the numbers, that this route sums.
        root: the rank that has the sum first.
        up: (child, parent) of each rank that sends partial sums, in the order in which they are added.
        down: (parent, child) of each rank that the sum is sent to.
    """

    share: Annotated[float, Within(0.0, 1.0)]
    root: Index
    up: tuple[tuple[Index, Index], ...]
    down: tuple[tuple[Index, Index], ...]


@dataclass(frozen=True)
class JoinOrder:
    """Become a member of a run that is under way: the order's ``hosts`` are its members.

    Attributes:
        folder: where the weights that it is given are kept until they are read.
        pace_s: seconds that it is expected to take for a microbatch; None: as others do.
        most_bytes: by layer, the most bytes that its state can have.
    """

    folder: Path
    pace_s: Seconds | None
    most_bytes: Mapping[int, ByteCount]


@dataclass(frozen=True)
class ElasticOrder:
    """Steps survive ranks that leave: the others go on in the same step (``worker.elastic``).

    Attributes:
        pipelines: by rank, the first rank of its pipeline; of all ranks, those that have joined too.
        shares: by first rank of a pipeline, its microbatches [first, stop) of a step, as planned.
        routes: by group, over which its layers are summed.
        least: fewer pipelines than these do not go on.
        witness: whether the launcher decides between two halves.
        dynamic: shares of later steps follow the pipelines' paces.
        join: None: this rank is one of the first members.
    """

    pipelines: Mapping[int, Index]
    shares: Mapping[int, IndexRange]
    routes: Mapping[int, tuple[RouteTree, ...]]
    least: Count = 1
    witness: bool = False
    dynamic: bool = False
    join: JoinOrder | None = None


@dataclass(frozen=True)
class CheckpointOptions:
    """When and where a rank writes checkpoints.

    Attributes:
        folder: the run's checkpoint folder on this node; see ``checkpoint.node.layout``.
        every: steps from one checkpoint to the next; 0: only at an early end, and ``at_end``.
        keep: how many of this node's newest steps are kept, at least 2; 0: all.
        at_end: whether one is written after the run's last step too.
        writes: whether this rank writes its layers; False: another pipeline does.
        attempt: the number of this attempt at the run; each new plan adds one.
    """

    folder: Path
    every: Index = 0
    keep: Index = 2
    at_end: bool = False
    attempt: Index = 0
    writes: bool = True


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a rank goes on from.

    Attributes:
        step: so many steps are done.
        folder: the run's checkpoint folder on this node.
        layers: by layer, the digest of its file; one that is not named may be of any.
    """

    step: Index
    folder: Path
    layers: Mapping[int, Sha256] = field(default_factory=dict)


@dataclass(frozen=True)
class BestValidation:
    """The lowest validation loss that a checkpoint is kept of. ``step``: steps that were done then."""

    step: Index
    loss: float


@dataclass(frozen=True)
class TurnsOrder:
    """Compute by turns with other runs on the device.

    Attributes:
        policy: as ``--turns`` has it.
        device: as all launchers call it that share it: the node's name, and the node's name of the device.
        persistent_bytes, ephemeral_bytes: what the rank keeps there, and what it has in a turn besides.
        capacity_bytes: what the device has for all runs; None: the rank does not ask whether there is room.
    """

    policy: Label
    device: Label
    persistent_bytes: Bytes = 0.0
    ephemeral_bytes: Bytes = 0.0
    capacity_bytes: Bytes | None = None


@dataclass(frozen=True)
class RankOrder:
    """Train the layers of one stage.

    Attributes:
        device: as its node calls it.
        threads: that it computes with; None: as many as torch takes.
        slowdown: so many times longer it makes each computation take.
        workload: with the paths of this node.
        steps: of the whole run, or its rounds.
        pipeline, stage, stages: its pipeline's number, its place there, and how many stages that has.
        layers: those that it holds.
        microbatches: of the whole step, over all pipelines.
        microbatch_range: the numbers, within the step, of those that its pipeline computes.
        in_flight: the most microbatches that it keeps activations of.
        weights_behind: by how many microbatches weight gradients are made later (``zero-bubble``).
        recompute: whether activations are computed again for the backward.
        receive_window: how many receives are posted ahead; 0: as many as fit.
        compare_batches: whether the launcher compares what data() gives on several ranks.
        weights: whether it saves its layers' weights at the end.
        trace: whether it records what it does when.
        sync: None: it has nothing to sum.
        rounds: None: steps are summed, not rounds.
        checkpoint: None: it writes none.
        resume: None: it begins with step 0.
        best: of the run so far; None: no checkpoint is kept for its loss.
        replicas: None: nobody else holds its layers.
        elastic: None: where a rank is lost, all of them end.
        turns: None: it computes whenever it can.
        experts: hosts hold the experts of its layers; None: it computes them itself.
    """

    kind: ClassVar[str] = "rank"
    world: WorldOrder
    run_id: Label
    device: DeviceName
    threads: Count | None
    slowdown: Annotated[float, Within(1.0, 1e9)]
    workload: WorkloadSpec
    recipe: Recipe
    steps: Count
    pipeline: Index
    stage: Index
    stages: Count
    layers: IndexRange
    microbatches: Count
    microbatch_range: IndexRange
    schedule: Label
    in_flight: Count
    weights_behind: Index
    recompute: bool
    receive_window: Index
    link_dtypes: LinkDtypes
    compare_batches: bool
    weights: bool
    trace: bool
    sync: SumOrder | None = None
    rounds: RoundOptions | None = None
    checkpoint: CheckpointOptions | None = None
    resume: ResumePoint | None = None
    replicas: ReplicaOrder | None = None
    best: BestValidation | None = None
    elastic: ElasticOrder | None = None
    turns: TurnsOrder | None = None
    experts: ExpertsOrder | None = None

    @property
    def is_first(self) -> bool:
        """Whether it is its pipeline's first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it is its pipeline's last stage."""
        return self.stage + 1 == self.stages

    @property
    def first_step(self) -> int:
        """The first step that the rank makes: that of the checkpoint it goes on from, or 0."""
        return 0 if self.resume is None else self.resume.step


@dataclass(frozen=True)
class HelperOrder:
    """Hold no layers, and only help others to sum.

    Attributes:
        device: as its node calls it.
        steps: of the whole run.
        first_step: the first step to make.
        sync: with one group.
        figures_every: after every so many steps batch norms' running figures are averaged, by each of them.
        trace: whether it records what it does when.
    """

    kind: ClassVar[str] = "helper"
    world: WorldOrder
    device: DeviceName
    steps: Count
    first_step: Index
    sync: SumOrder
    figures_every: tuple[Count, ...]
    trace: bool


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: that scores are divided by; 0: the best one is taken.
        top_p: of the likeliest tokens that together have this share of the probability.
        seed: of the choice.
    """

    temperature: Annotated[float, Within(0.0, 100.0)] = 0.0
    top_p: Annotated[float, Within(0.0, 1.0)] = 1.0
    seed: Annotated[int, Within(0, 2**62)] = 0


@dataclass(frozen=True)
class GenerationOrder:
    """Hold the layers of one stage, and generate text with them.

    Attributes:
        device: as its node calls it.
        threads: that it computes with; None: as many as torch takes.
        workload: with the paths of this node.
        layers: those that it holds.
    """

    kind: ClassVar[str] = "generation"
    world: WorldOrder
    device: DeviceName
    threads: Count | None
    workload: WorkloadSpec
    layers: IndexRange
    sampling: Sampling = Sampling()


AnyRankOrder = RankOrder | HelperOrder
RANK_ORDERS: tuple[type[RankOrder | HelperOrder | GenerationOrder], ...] = (
    RankOrder,
    HelperOrder,
    GenerationOrder,
)
