"""A rank's part in a run that survives the ranks that leave: its membership, from connecting to the end."""

from __future__ import annotations

import threading
from contextlib import suppress

from skyctl.agent.task_events import to_message
from skyctl.agent.task_orders import read_request
from skyctl.agent.task_runner import AgentGoneError, TaskChannel
from skyctl.errors import RunError, SkyctlError, WorkloadError
from skyctl.worker.elastic.elastic_steps import LOSS, ElasticSteps, SumConnections, interrupt_in_thread
from skyctl.worker.elastic.membership import Membership
from skyctl.worker.member_messages import Accept, Generation, MemberMessage, Prepare
from skyctl.worker.rank_events import MembersEvent, WitnessAskedEvent
from skyctl.worker.rank_order import ElasticOrder, RankOrder
from skyctl.worker.rank_requests import StopTrainingRequest, WitnessRequest
from skyctl.worker.sums.gradient_sync import GradientSync
from skyctl.worker.updates.stage_update import StageUpdate
from skyctl.worker.world import World

_LISTEN_S = 0.2


class ElasticRank:
    """One rank's membership; ``start`` before the first step, ``close`` in any case.

    Args:
        order: with ``elastic`` and ``sync``.
        world: connected.
    """

    def __init__(self, order: RankOrder, elastic: ElasticOrder, world: World, channel: TaskChannel) -> None:
        self._order, self._elastic, self._world, self._channel = order, elastic, world, channel
        self._connections = SumConnections(world.sum_group, order.world.rank)
        shares = {rank: (first, stop) for rank, (first, stop) in elastic.shares.items()}
        generation = Generation(0, tuple(sorted(shares)), shares, step=order.first_step)
        self.members = Membership(
            order.world.rank,
            generation,
            order.microbatches,
            world.connect_members(),
            ask_witness=self._ask_witness if elastic.witness else None,
            on_change=interrupt_in_thread(self._connections),
            least=elastic.least,
            is_dynamic=elastic.dynamic,
        )
        self.is_stop_requested = self._is_closed = False
        self._listener = threading.Thread(target=self._hear_launcher, daemon=True, name="hears the launcher")

    def make_rule(self, update: StageUpdate, sync: GradientSync) -> ElasticSteps:
        """What sums and updates.

        Raises:
            WorkloadError: a norm has running figures, which ranks average outside of steps.
        """
        order, sums = self._order, self._order.sync
        assert sums is not None
        if sync.has_figures:
            raise WorkloadError(
                "batch norms average running figures between ranks after a step, and --elastic does not "
                "do that yet",
                hint="use layer or group norms, or launch without --elastic",
            )
        [group] = sums.groups
        return ElasticSteps(
            update,
            sync,
            self.members,
            self._connections,
            self._world.peers,
            group,
            self._elastic,
            order.world,
            self._tell,
        )

    @property
    def shared_bytes(self) -> int:
        """How many bytes ranks share beside a sum: each its loss."""
        return LOSS.size * self._order.world.ranks

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that are there: it validates, and writes checkpoints."""
        return self.members.generation.arbiter == self._order.world.rank

    def start(self) -> None:
        """The first step is next: from now on the launcher's requests are heard at any time."""
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
    if order.stages > 1 or not plain or sums is None or len(sums.groups) != 1:
        raise RunError("the order is to survive ranks that leave, and is not of a plain data-parallel plan")
