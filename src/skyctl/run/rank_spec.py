"""A plan → what each rank is ordered to do. Pure: a dry run prints the very orders that a launch sends.

Ranks are counted by pipeline, and within one from the first layers to the last; then come those that hold no
layers and help others to sum gradients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyctl.agent.message_fields import with_index
from skyctl.checkpoint.node.recovery import RestorePoint
from skyctl.errors import InputError, MismatchError
from skyctl.planning.backend_choice import backend_of
from skyctl.planning.shared_runs import memory_needs
from skyctl.records.backend import GLOO
from skyctl.records.cluster import Cluster, Node, split_device_id
from skyctl.records.plan import Plan
from skyctl.remote.credentials import RankCredentials
from skyctl.run.expert_spec import RankExperts
from skyctl.run.replica_spec import replica_orders
from skyctl.run.round_spec import check_rounds, compares_batches, patience_s, round_options
from skyctl.run.sum_spec import check_sums, clock_references, equal_ring, over_ring, rank_sums
from skyctl.run.world_order import world_order
from skyctl.schedule.actions import check_in_flight
from skyctl.worker.rank_order import (
    AnyRankOrder,
    BestValidation,
    CheckpointOptions,
    ElasticOrder,
    HelperOrder,
    LinkDtypes,
    RankOrder,
    ResumePoint,
    RoundOptions,
    TurnsOrder,
    WorldOrder,
)
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec


@dataclass(frozen=True)
class RankSpec:
    """One process: its rank, where it runs, and what it is ordered to do.

    ``shard_limits``: by layer of its own, the most bytes that a file with its state may have.
    ``summed_numels``: of the gradients of each layer, the last one first, as the plan has them; None: it does
    not say. ``experts``: what it has on hosts; None: nothing.
    """

    rank: int
    node: str
    device: str
    order: AnyRankOrder
    shard_limits: Mapping[int, int] = field(default_factory=dict)
    summed_numels: tuple[int, ...] | None = None
    experts: RankExperts | None = None

    @property
    def helps(self) -> bool:
        """Whether it holds no layers, and only helps others to sum."""
        return isinstance(self.order, HelperOrder)

    @property
    def pipeline(self) -> int | None:
        """The number of its pipeline; None for a rank that helps."""
        return self.order.pipeline if isinstance(self.order, RankOrder) else None

    @property
    def asks_room(self) -> bool:
        """Whether it asks for its memory on a device that it shares with other runs before it builds."""
        turns = self.order.turns if isinstance(self.order, RankOrder) else None
        return turns is not None and turns.capacity_bytes is not None

    @property
    def layers(self) -> range:
        """The layers that the rank holds; none for one that helps."""
        return range(*self.order.layers) if isinstance(self.order, RankOrder) else range(0)

    @property
    def is_last(self) -> bool:
        """Whether it is its pipeline's last stage, which has the loss."""
        return isinstance(self.order, RankOrder) and self.order.is_last

    @property
    def rounds(self) -> RoundOptions | None:
        """How it makes rounds of local steps; None: ranks sum gradients in every step, or it only helps."""
        return self.order.rounds if isinstance(self.order, RankOrder) else None

    @property
    def owner(self) -> str | None:
        """The name of the owner whose data it trains on; None: all ranks draw from the same data."""
        return self.rounds.owner if self.rounds is not None else None

    @property
    def is_elastic(self) -> bool:
        """Whether the others go on in the same step where it is lost."""
        return isinstance(self.order, RankOrder) and self.order.elastic is not None

    @property
    def joins(self) -> bool:
        """Whether it enters an attempt that is under way."""
        return (
            isinstance(self.order, RankOrder)
            and self.order.elastic is not None
            and (self.order.elastic.join is not None)
        )

    @property
    def may_stop_early(self) -> bool:
        """Whether the run may end before its last step, as validations are no better."""
        return isinstance(self.order, RankOrder) and self.order.recipe.patience is not None

    @property
    def source(self) -> str | None:
        """The workload as typed; None for a rank that helps, which is told none."""
        return self.order.workload.source if isinstance(self.order, RankOrder) else None

    def with_credentials(self, credentials: RankCredentials) -> AnyRankOrder:
        """The order as it is sent: with what this rank shares with its peers, which is kept nowhere."""
        world = replace(self.order.world, secrets=credentials.secrets, tls=credentials.tls)
        order = replace(self.order, world=world)
        if isinstance(order, HelperOrder) or order.replicas is None:
            return order
        return replace(order, replicas=replace(order.replicas, secret=credentials.replica_secret))


@dataclass(frozen=True)
class AttemptCheckpoints:
    """The checkpoints of an attempt: the one that its ranks go on from, and those that they write.

    Attributes:
        attempt: its number.
        folders: by node that holds layers, the run's checkpoint folder there.
        origin: what they go on from; None: they begin.
        every: steps from one checkpoint to the next; 0: only at the end. None: they write none.
        keep: how many of a node's newest steps are kept.
        best: what is kept for its validation loss as they begin.
    """

    attempt: int = 0
    folders: Mapping[str, str] = field(default_factory=dict)
    origin: RestorePoint | None = None
    every: int | None = None
    keep: int = 2
    best: BestValidation | None = None


def rank_task_name(rank: int) -> str:
    """The name of a rank's task on its node."""
    return f"rank-{rank}"


def rank_of_task(name: str) -> int | None:
    """The rank whose task is called so; None for a task that is no rank."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "rank" and re.fullmatch("[0-9]{1,8}", number) else None


def last_ranks(specs: Sequence[RankSpec]) -> tuple[int, ...]:
    """By pipeline, the rank of its last stage, which computes the loss."""
    return tuple(spec.rank for spec in specs if spec.is_last)


def owners_of(specs: Sequence[RankSpec]) -> tuple[str, ...]:
    """By pipeline, what its owner is called; empty where data is nobody's alone."""
    return tuple(spec.owner for spec in specs if spec.is_last and spec.owner is not None)


def holding_specs(specs: Sequence[RankSpec]) -> list[RankSpec]:
    """The specs of ranks that hold layers, in rank order: 0 … n−1, for helpers come after them."""
    return [spec for spec in specs if not spec.helps]


def peer_pairs(specs: Sequence[RankSpec]) -> list[tuple[int, int]]:
    """The ranks that exchange tensors with each other, the lower one of each pair first."""
    pairs = ((spec.rank, peer) for spec in specs for peer in spec.order.world.hosts)
    return sorted({(min(pair), max(pair)) for pair in pairs})


def replica_sets(specs: Sequence[RankSpec]) -> set[tuple[int, ...]]:
    """The sets of ranks that hold the same layers, of two or more."""
    orders = [spec.order for spec in specs if isinstance(spec.order, RankOrder)]
    return {order.replicas.ranks for order in orders if order.replicas is not None}


def check_plan_fits(plan: Plan, cluster: Cluster) -> None:
    """Refuses a plan that its schedule or the cluster's devices do not allow.

    Raises:
        InputError: the numbers in flight are not the schedule's, or its pipelines' sums are not launched by
            this version (``sum_spec.check_sums``).
        MismatchError: names the first device that is not, and the nodes there are.
    """
    for number, (pipeline, microbatches) in enumerate(zip(plan.pipelines, _microbatches(plan), strict=True)):
        in_flight = [stage.in_flight for stage in pipeline.stages]
        deferred = [stage.weights_behind for stage in pipeline.stages]
        fault = check_in_flight(plan.problem.schedule, in_flight, microbatches, deferred)
        if fault is not None:
            where = f"pipeline {number}: " if len(plan.pipelines) > 1 else ""
            raise InputError(
                f"the plan can't be played: {where}{fault}", hint="see what else: skyctl verify PLAN.json"
            )
    check_sums(plan)
    check_rounds(plan)
    names = [node.name for node in cluster.nodes]
    for device in (*(stage.device for stage in plan.placed_stages), *plan.helpers):
        node, local = split_device_id(device)
        if node not in names:
            raise MismatchError(
                f"the plan uses device {device!r}, but cluster {cluster.name!r} has no node "
                f"{node!r}; it has {', '.join(names)}",
                hint="plan again for this cluster: skyctl plan WORKLOAD",
            )
        listed = cluster.node(node).devices
        if listed is not None and local not in set(map(with_index, listed)):
            raise MismatchError(
                f"the plan uses device {device!r}, but cluster {cluster.name!r} lists "
                f"{', '.join(listed)} for node {node!r}",
                hint="plan again for this cluster: skyctl plan WORKLOAD",
            )


def rank_specs(
    plan: Plan,
    cluster: Cluster,
    *,
    run_id: str,
    steps: int,
    workload: Mapping[str, WorkloadSpec],
    addresses: Mapping[str, str],
    weights: bool = True,
    recipe: Recipe | None = None,
    trace: bool = False,
    checkpoints: AttemptCheckpoints | None = None,
    elastic: ElasticOrder | None = None,
    turns: str | None = None,
) -> list[RankSpec]:
    """The ranks of all pipelines, in their order, and then the helpers'.

    Args:
        workload: by node that holds layers, the workload's description with the paths valid on that node.
        recipe: how to train beside that; None: plainly.
        addresses: by node, the address at which its peers reach it.
        checkpoints: None: ranks go on from none, and write none.
        elastic: None: the attempt ends where a rank is lost.
        turns: the policy by which devices are shared with other runs; None: they are not.
    """
    maker = _OrderMaker(
        plan,
        cluster,
        run_id=run_id,
        steps=steps,
        workload=workload,
        addresses=addresses,
        weights=weights,
        recipe=recipe or Recipe(total_steps=steps),
        trace=trace,
        checkpoints=checkpoints or AttemptCheckpoints(),
        elastic=elastic,
        turns=turns,
    )
    made: list[RankSpec] = []
    first = 0
    for number, (pipeline, microbatches) in enumerate(zip(plan.pipelines, _microbatches(plan), strict=True)):
        for index, stage in enumerate(pipeline.stages):
            rank = len(made)
            order = maker.rank_order(rank, number, index, (first, first + microbatches))
            made.append(RankSpec(rank, maker.nodes[rank].name, stage.device, order))
        first += microbatches if plan.problem.owners is None else 0
    for device in plan.helpers:
        rank = len(made)
        made.append(RankSpec(rank, maker.nodes[rank].name, device, maker.helper_order(rank, device)))
    return made


@dataclass
class _OrderMaker:
    """Makes the orders of one attempt; the first fields are arguments of ``rank_specs``.

    Attributes:
        nodes: by rank, its node.
    """

    plan: Plan
    cluster: Cluster
    run_id: str
    steps: int
    workload: Mapping[str, WorkloadSpec]
    addresses: Mapping[str, str]
    weights: bool
    recipe: Recipe
    trace: bool
    checkpoints: AttemptCheckpoints
    elastic: ElasticOrder | None
    turns: str | None
    nodes: list[Node] = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        devices = (*(stage.device for stage in plan.placed_stages), *plan.helpers)
        self.nodes = [self.cluster.node(split_device_id(device)[0]) for device in devices]
        sums = rank_sums(plan)
        self._clocks = clock_references(plan, sums)
        ring = equal_ring(plan) if backend_of(plan) == GLOO else None
        self._sums = [None if sync is None else over_ring(sync, ring) for sync in sums]
        self._replicas = replica_orders(
            plan,
            [self.addresses[node.name] for node in self.nodes],
            may_leave=self.elastic is not None,
        )
        self._threads = {machine.device: machine.threads for machine in plan.machines}

    def rank_order(self, rank: int, number: int, index: int, microbatch_range: tuple[int, int]) -> RankOrder:
        """The order of a rank that holds layers.

        Args:
            number: its pipeline's.
            index: its stage's.
            microbatch_range: as the order has it.
        """
        plan, problem = self.plan, self.plan.problem
        pipeline = plan.pipelines[number]
        stage = pipeline.stages[index]
        node = self.nodes[rank]
        rounds, workload = round_options(plan, number), self.workload[node.name]
        before = rank - 1 if index > 0 else None
        after = rank + 1 if index + 1 < len(pipeline.stages) else None
        return RankOrder(
            world=self._world(rank, before, after),
            run_id=self.run_id,
            device=split_device_id(stage.device)[1],
            threads=node.threads or self._threads.get(stage.device),
            slowdown=node.slowdown,
            workload=workload if rounds is None else replace(workload, owner=rounds.owner),
            recipe=self.recipe,
            steps=self.steps,
            pipeline=number,
            stage=index,
            stages=len(pipeline.stages),
            layers=(stage.start, stage.stop),
            microbatches=problem.microbatches,
            microbatch_range=microbatch_range,
            schedule=problem.schedule,
            in_flight=stage.in_flight,
            weights_behind=stage.weights_behind,
            recompute=stage.recompute,
            receive_window=problem.receive_window,
            link_dtypes=_link_dtypes(plan, rank, before, after),
            compare_batches=compares_batches(plan),
            weights=self.weights and (number == 0 or self.elastic is not None),
            trace=self.trace,
            sync=self._sums[rank],
            rounds=rounds,
            checkpoint=self._checkpoint(node.name, number),
            resume=self._resume(node.name, stage.start, stage.stop),
            replicas=self._replicas[rank],
            best=self.checkpoints.best if problem.owners is None else None,
            elastic=self.elastic,
            turns=self._turns_order(stage.device),
        )

    def _turns_order(self, device: str) -> TurnsOrder | None:
        if self.turns is None:
            return None
        need = memory_needs(self.plan)[device]
        return TurnsOrder(
            self.turns,
            device,
            need.persistent_bytes,
            need.ephemeral_bytes,
            {described.id: described.memory_bytes for described in self.plan.problem.devices}[device],
        )

    def helper_order(self, rank: int, device: str) -> HelperOrder:
        """The order of a rank that only helps to sum."""
        sync, origin = self._sums[rank], self.checkpoints.origin
        assert sync is not None, "a helper is on some route"
        every = (self.recipe.validate_every, self.checkpoints.every)
        return HelperOrder(
            world=self._world(rank, None, None),
            device=split_device_id(device)[1],
            steps=self.steps,
            first_step=0 if origin is None else origin.step,
            sync=sync,
            figures_every=tuple(steps for steps in every if steps),
            trace=self.trace,
        )

    def _world(self, rank: int, before: int | None, after: int | None) -> WorldOrder:
        sync = self._sums[rank]
        sum_peers: Sequence[int] = () if sync is None else sync.peers
        if self.elastic is not None:  # any of them may have to go on with any other
            sum_peers = [other for other in sorted(self.elastic.pipelines) if other != rank]
        return world_order(
            rank,
            self.nodes,
            self.addresses,
            backend=backend_of(self.plan),
            before=before,
            after=after,
            sum_peers=sum_peers,
            clock_of=self._clocks[rank],
            clock_for=tuple(other for other, of in enumerate(self._clocks) if of == rank),
            timeout_s=patience_s(self.plan, self.steps),
        )

    def _checkpoint(self, node: str, pipeline: int) -> CheckpointOptions | None:
        kept = self.checkpoints
        if kept.every is None:
            return None
        return CheckpointOptions(
            folder=Path(kept.folders[node]),
            every=kept.every,
            keep=kept.keep,
            at_end=True,
            attempt=kept.attempt,
            writes=pipeline == 0,
        )

    def _resume(self, node: str, start: int, stop: int) -> ResumePoint | None:
        origin = self.checkpoints.origin
        if origin is None:
            return None
        return ResumePoint(origin.step, Path(self.checkpoints.folders[node]), origin.sha256s(start, stop))


def _link_dtypes(plan: Plan, rank: int, before: int | None, after: int | None) -> LinkDtypes:
    """The dtypes of a stage's four streams; both ends read the same link."""
    links = {(link.source, link.target): link.dtype for link in plan.problem.links}
    devices = [stage.device for stage in plan.placed_stages]
    here = devices[rank]
    previous = "" if before is None else devices[before]
    following = "" if after is None else devices[after]
    return LinkDtypes(
        to_next=links.get((here, following)),
        from_next=links.get((following, here)),
        to_previous=links.get((here, previous)),
        from_previous=links.get((previous, here)),
    )


def _microbatches(plan: Plan) -> list[int]:
    """By pipeline, how many of a step's microbatches it computes."""
    if len(plan.pipelines) == 1:
        return [plan.problem.microbatches]
    return [pipeline.microbatches for pipeline in plan.pipelines]


def used_nodes(plan: Plan, cluster: Cluster) -> list[Node]:
    """The nodes that hold a stage or help to sum, in inventory order."""
    devices = (*(stage.device for stage in plan.placed_stages), *plan.helpers)
    names = {split_device_id(device)[0] for device in devices}
    return [node for node in cluster.nodes if node.name in names]
