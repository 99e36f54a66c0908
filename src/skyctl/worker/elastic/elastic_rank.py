"""A rank's part in a run whose ranks come and go: its membership, from connecting to the end."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from dataclasses import replace

from skyctl.agent.task_events import to_message
from skyctl.agent.task_orders import read_request
from skyctl.agent.task_runner import AgentGoneError, TaskChannel
from skyctl.checkpoint.node.shards import StageState
from skyctl.errors import RunError, SkyctlError, WorkloadError
from skyctl.transport.transfer_errors import PeerProtocolError
from skyctl.worker.checkpointer import ShardOrigin
from skyctl.worker.elastic.elastic_steps import SHARED, ElasticSteps, SumConnections, interrupt_in_thread
from skyctl.worker.elastic.given_state import StateGiver, StateReceiver
from skyctl.worker.elastic.membership import Membership
from skyctl.worker.member_messages import Accept, Generation, MemberMessage, Prepare, StatePart
from skyctl.worker.peer import Peer
from skyctl.worker.rank_events import MembersEvent, WitnessAskedEvent
from skyctl.worker.rank_order import ElasticOrder, RankOrder
from skyctl.worker.rank_requests import AdmitRequest, StopTrainingRequest, WitnessRequest
from skyctl.worker.sums.gradient_sync import GradientSync
from skyctl.worker.updates.stage_update import StageUpdate
from skyctl.worker.world import World

_LISTEN_S = 0.2


class ElasticRank:
    """One rank's membership: ``enter``, then ``start`` before the first step; ``close`` in any case.

    Making it connects to all others, for sums and as members; a rank that joins connects as a member.

    Args:
        order: with ``elastic`` and ``sync``.
        layers: how many the model has.

    Raises:
        PeerUnreachableError: another one can't be reached, or did not come in time.
    """

    def __init__(
        self, order: RankOrder, elastic: ElasticOrder, world: World, channel: TaskChannel, layers: int
    ) -> None:
        self._order, self._elastic, self._world, self._channel = order, elastic, world, channel
        join, rank = elastic.join, order.world.rank
        self._receiver = None if join is None else StateReceiver(join, layers)
        self._giver: StateGiver | None = None
        self._shared: bytes | None = None
        shares = {first: (start, stop) for first, (start, stop) in elastic.shares.items()}
        members = tuple(sorted(elastic.pipelines))
        generation = Generation(0, members, shares, step=order.first_step) if join is None else None
        group, self._peers = world.connect_sums(later=join is not None)
        self._connections = SumConnections(group, rank)
        self.members = Membership(
            rank,
            generation,
            order.microbatches,
            world.connect_members(),
            pipelines=elastic.pipelines,
            ask_witness=self._ask_witness if elastic.witness else None,
            on_change=interrupt_in_thread(self._connections),
            least=elastic.least,
            is_dynamic=elastic.dynamic,
            on_part=self._take_part,
            on_new=self._give,
        )
        self.is_stop_requested = self._is_closed = self._is_started = False
        self._listener = threading.Thread(target=self._hear_launcher, daemon=True, name="hears the launcher")

    def make_rule(self, update: StageUpdate, sync: GradientSync) -> ElasticSteps:
        """Makes the rule that sums and updates.

        Raises:
            WorkloadError: a norm has running figures, which ranks average outside of steps.
        """
        sums = self._order.sync
        assert sums is not None
        if sync.has_figures:
            raise WorkloadError(
                "batch norms average running figures between ranks after a step, and --elastic does not "
                "do that yet",
                hint="use layer or group norms, or launch without --elastic",
            )
        if self._shared is not None:
            holder = self.members.generation.holders[0]
            try:
                sync.take_shared_state(self._shared)
            except (ValueError, RecursionError) as exc:
                raise PeerProtocolError(
                    f"rank {holder} tells what ranks share for their sums, but {exc}", peer_rank=holder
                ) from exc
        if self._giver is not None:
            self._giver.shared = sync.shared_state
        return ElasticSteps(
            update,
            sync,
            self.members,
            self._connections,
            self._peers,
            sums.groups,
            self._elastic,
            self._order.world.rank,
            self._tell,
        )

    def enter(self) -> RankOrder:
        """Has a rank that joins wait until it is a member and has its state; before the optimizer is made.

        Returns:
            The order; of a rank that joins, it goes on from what it was given.

        Raises:
            RunError: the members did not let it in, or may not go on.
        """
        join = self._elastic.join
        if join is None or self._receiver is None:
            return self._order
        self.start()
        self.members.join(join.pace_s, self._order.world.timeout_s)
        resume, self._shared = self._receiver.wait(self.members)
        return replace(self._order, resume=resume)

    def has_state(self, state: StageState, origin: ShardOrigin) -> None:
        """The stage is as others have it; from now on this rank can give it to those that join."""
        self._giver = StateGiver(self._order.world.rank, self._channel.folder / "given", state, origin)
        self.members.has_state()

    @property
    def has_joined(self) -> bool:
        """Whether the run was under way before this rank was there."""
        return self._elastic.join is not None

    @property
    def peers(self) -> dict[int, Peer]:
        """By rank, all others that it sums with."""
        return self._peers

    @property
    def shared_bytes(self) -> int:
        """How many bytes ranks share beside a sum: each its loss, and the best validation."""
        return SHARED.size * len(self._elastic.pipelines)

    @property
    def is_first(self) -> bool:
        """Whether its pipeline is the first of those that are there: it validates, and writes checkpoints."""
        return self.members.is_first

    def start(self) -> None:
        """From now on others are heard, and the launcher's requests at any time. Idempotent."""
        if self._is_started:
            return
        self._is_started = True
        self.members.start()
        self._listener.start()

    def leave(self) -> None:
        """The last step has taken effect: from now on nobody is missed."""
        self._is_closed = True
        self._connections.close()
        self.members.leave()

    def close(self) -> None:
        """Leaves, whatever the others are at. Idempotent."""
        self._is_closed = True
        self._connections.close()
        self.members.close()
        if self._listener.is_alive():
            self._listener.join()

    def _hear_launcher(self) -> None:
        with suppress(AgentGoneError, SkyctlError):
            while not self._is_closed:
                received = self._channel.recv(_LISTEN_S)
                op = None if received is None else received[0].get("op")
                if received is not None and op == WitnessRequest.kind:
                    answer = read_request([WitnessRequest], received[0])
                    message = answer.promise or answer.accepted or answer.refused
                    if message is not None:
                        self.members.take_witness(message)
                elif op == StopTrainingRequest.kind:
                    self.is_stop_requested = True
                elif received is not None and op == AdmitRequest.kind:
                    asked = read_request([AdmitRequest], received[0])
                    threading.Thread(
                        target=self._admit, args=(asked,), daemon=True, name=f"admits rank {asked.rank}"
                    ).start()

    def _admit(self, asked: AdmitRequest) -> None:
        with suppress(RunError):  # it did not come
            as_member, as_summing = self._world.admit(asked.rank, asked.host, asked.secret, asked.limit_s)
            self._peers[asked.rank] = as_summing
            self.members.admit(asked.rank, as_member)

    def _take_part(self, rank: int, part: StatePart, data: bytes) -> None:
        if self._receiver is None:
            raise PeerProtocolError(f"rank {rank} gives this one weights that it has", peer_rank=rank)
        self._receiver.take(rank, part, data)

    def _give(self, generation: Generation) -> None:
        threading.Thread(
            target=self._give_state, args=(generation,), daemon=True, name="gives weights"
        ).start()

    def _give_state(self, generation: Generation) -> None:
        assert self._giver is not None, "has_state() first"
        try:
            self._giver.give(self.members, generation)
        except SkyctlError as exc:  # they would be waited for
            print(f"can't give weights to those that join: {exc.message}", file=sys.stderr)
            for rank in generation.new:
                self.members.lose(rank)

    def _ask_witness(self, message: MemberMessage) -> None:
        with suppress(AgentGoneError):  # it ends this rank, too
            if isinstance(message, Prepare):
                self._channel.send(to_message(WitnessAskedEvent(prepare=message)))
            elif isinstance(message, Accept):
                self._channel.send(to_message(WitnessAskedEvent(accept=message)))

    def _tell(self, generation: Generation) -> None:
        step = generation.step + generation.is_applied
        self._channel.send(to_message(MembersEvent(generation.number, generation.members, step)))


def check_elastic(order: RankOrder) -> None:
    """Raises RunError where an order asks for more than ranks that leave allow."""
    sums = order.sync
    if order.elastic is None:
        return
    plain = sums is not None and not sums.delay and sums.staleness is None and order.rounds is None
    ranks, pipelines = {order.world.rank, *order.world.hosts}, order.elastic.pipelines
    if sums is None or not plain or pipelines.keys() != ranks or any(group.tie for group in sums.groups):
        raise RunError("the order is to survive ranks that leave, and is not of plain pipelines side by side")
    if order.elastic.join is not None and order.stages > 1:
        raise RunError("the order is to join pipelines that are under way, and has one stage of several")
