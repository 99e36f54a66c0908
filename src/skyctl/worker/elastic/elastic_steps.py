"""Steps that survive the ranks that leave in them: the others make their microbatches, and sum again.

All that a rank computes of a step stays until the step's sum takes effect: copies are summed
(``KeptGradients``), and a sum that can't end is made again, among those that are left, from what they have
and from the microbatches of those that are gone. Nothing is rolled back. With ``fixed32`` the sum has the
bits that it would have had.

The stages of a pipeline make the same microbatches in the same order: those that it began the step with, then
what it was given as another pipeline left. Each such range is a schedule of its own.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from statistics import median
from typing import Any, NoReturn, Protocol

from skyctl.errors import RunError
from skyctl.transport.transfer_errors import PeerLostError, PeerProtocolError
from skyctl.worker.batches.rank_batches import RankBatches
from skyctl.worker.batches.sample_batches import Prefetcher
from skyctl.worker.elastic.agreement import BEFORE_ALL
from skyctl.worker.elastic.membership import Membership
from skyctl.worker.elastic.microbatch_shares import numbers_in
from skyctl.worker.elastic.route_trees import place_on, routes_among
from skyctl.worker.member_messages import Generation, Ranges
from skyctl.worker.peer import Peer
from skyctl.worker.pipeline.executor import Executor
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.worker.rank_order import ElasticOrder, IndexRange, SumGroupOrder
from skyctl.worker.sums.gradient_sync import GradientSync
from skyctl.worker.updates.best_validation import BestSoFar
from skyctl.worker.updates.stage_update import StageUpdate
from skyctl.worker.updates.step_report import StepReport
from skyctl.worker.updates.update_rules import EachStep

SHARED = struct.Struct("<ddQ")
"""The values that a rank shares beside the sum, as others need them if that rank is lost: its part of the
step's loss, and the lowest validation loss with the steps that were done then (0: none)."""
RECONNECT_S = 3600.0
"""For members to come to a sum that is made again; their signs of life say earlier if they don't."""
NO_SHARE: IndexRange = (0, 0)
_INTERRUPT_S = 0.05
_KEPT_PACES = 16


class ReconnectingGroup(Protocol):
    """The part of ``SkyctlProcessGroup`` that is needed."""

    def reconnect(self, uuid: int, peers: Sequence[int], timeout_s: float) -> None: ...
    def abort(self) -> None: ...


class SumConnections:
    """The connections that sums go over: those of one generation, and of no other.

    Args:
        group: whose peers of the first generation are connected.
        rank: this one's.
    """

    def __init__(self, group: ReconnectingGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._lock = threading.Lock()
        self._wanted = 0
        self._is_closed = False

    def renew(self, number: int, members: Sequence[int]) -> None:
        """Connects to these members for sums of that generation.

        Raises:
            RunError: one of them did not come; or ``give_up`` was called.
        """
        with self._lock:  # what ended older connections is over, and does not end these
            self._wanted = number
        self._group.reconnect(number, [rank for rank in members if rank != self._rank], RECONNECT_S)

    def give_up(self, number: int) -> None:
        """Ends what waits on connections of that generation, until there is a newer one."""
        while True:
            with self._lock:
                if self._wanted > number or self._is_closed:
                    return
                self._group.abort()
            time.sleep(_INTERRUPT_S)

    def close(self) -> None:
        """Nothing is to be given up any more."""
        self._is_closed = True


class ElasticBatches:
    """A rank's samples of each step, whatever its share is; in the place of a ``Prefetcher``.

    Args:
        first: reads the share that the rank begins with.
    """

    def __init__(self, batches: RankBatches, share: IndexRange, first: Prefetcher) -> None:
        self._batches, self._share, self._reader = batches, share, first

    def get(self) -> tuple[Any, Any]:
        """The next batch of the share."""
        return self._reader.get()

    def prefetch(self) -> None:
        """Fetches the next batch of the share now, where that is safe."""
        self._reader.prefetch()

    def change(self, step: int, share: IndexRange) -> None:
        """From that step on, this share is read; of an empty one nothing is."""
        if share != self._share and share[0] < share[1]:
            self._reader = Prefetcher(self._batches.reader(step, *share))
        self._share = share

    def once(self, step: int, share: IndexRange) -> tuple[Any, Any]:
        """One step's samples of another share."""
        return next(self._batches.reader(step, *share))


class ElasticSteps(EachStep):
    """Makes steps with the ranks that are there: what updates weights, and what makes the steps.

    Args:
        sync: keeps a rank's own gradients.
        peers: by rank, all others that it sums with; those that join are added.
        groups: those of the order.
        order: shares and routes as planned.
        rank: this one's.
        tell: called with each generation that this rank makes sums in.
    """

    def __init__(
        self,
        update: StageUpdate,
        sync: GradientSync,
        members: Membership,
        connections: SumConnections,
        peers: dict[int, Peer],
        groups: Sequence[SumGroupOrder],
        order: ElasticOrder,
        rank: int,
        tell: Callable[[Generation], None],
    ) -> None:
        super().__init__(update, sync)
        self._sums, self._members, self._connections = sync, members, connections
        self._peers, self._groups, self._order, self._tell = peers, list(groups), order, tell
        self._rank = rank
        self._loss = 0.0
        self._step_pace_s: float | None = None
        self._number = 0 if order.join is None else BEFORE_ALL
        routes = [route for routes in order.routes.values() for route in routes]
        self._planned = {end for route in routes for edge in route.up for end in edge}
        self._places: list[int] = sorted(order.pipelines)
        self._has_begun = False
        self._made: Ranges = ()
        self._share = order.shares[order.pipelines[rank]] if order.join is None else NO_SHARE
        self._paces: deque[float] = deque(maxlen=_KEPT_PACES)

    def attach(self, executor: Executor, batches: RankBatches, seeder: LayerSeeder, best: BestSoFar) -> None:
        """Takes what makes microbatches, before the first step; ``best``: is told of others' validations."""
        self._executor, self._rank_batches, self._seeder = executor, batches, seeder
        self._best = best

    def read(self, first: Prefetcher) -> ElasticBatches:
        """Makes the reader of batches, whatever the share is; ``first``: that with which this rank begins."""
        self._batches = ElasticBatches(self._rank_batches, self._share, first)
        return self._batches

    def step(
        self,
        step: int,
        next_batch: Callable[[], tuple[Any, Any]],
        *,
        stop_requested: Callable[[], bool],
        while_waiting: Callable[[], None],
    ) -> StepReport:
        """As of ``training_loop.StepMaker``."""
        self._made = self._members.held[:1]
        share = self._made[0] if self._made else NO_SHARE
        self._take(share)
        self._batches.change(step, share)
        self._members.begin_step(step)
        self._members.left = share[1] - share[0]
        try:
            report = self._executor.step(
                step, next_batch, stop_requested=stop_requested, while_waiting=while_waiting
            )
        except PeerProtocolError:
            raise
        except PeerLostError as exc:
            with self._waits_for_members(step):
                self._end_with_pipeline(exc)
        if self._executor.is_last:
            report.loss = self._loss
        self._seeder.first_microbatch = 0  # a validation has microbatches of its own
        report.samples = sum(self._rank_batches.all_sizes[number] for number in numbers_in(self._made))
        return report

    def _end_with_pipeline(self, lost: PeerLostError) -> NoReturn:
        """Another stage is lost: the others go on without this pipeline, once they have agreed on it.

        Raises:
            RunError: says so.
        """
        number = self._members.generation.number
        if lost.peer_rank is not None:
            self._members.lose(lost.peer_rank)
        self._members.wait_change(number)
        raise lost

    def start_step(self, step: int, report: StepReport) -> None:
        """The step's first forward is next; what ranks share for its sums now is remembered."""
        super().start_step(step, report)
        self._sums.mark_step()

    def begin(self, step: int, *, early: bool) -> None:
        """The share's last backward is next; the sum begins beside it, unless somebody has left meanwhile."""
        self._has_begun = False
        if self._members.is_current(self._number) and self._members.held == self._made:
            with suppress(PeerLostError):
                self._sums.begin(step, early=early)
                self._has_begun = True

    def finish(self, step: int, report: StepReport) -> bool:
        """Sums until the step's sum takes effect, among whoever is there; then updates the weights.

        Raises:
            RunError: the members that are left may not go on, or too few are; or as ``EachStep.finish``.
        """
        self._note_pace(report)
        self._members.left = 0
        report.sync_s = 0.0
        while True:
            generation = self._members.generation
            self._make_missing(step, report)
            with self._waits_for_members(step):
                is_connected = self._is_connected(generation)
            if not is_connected:
                continue
            has_begun, self._has_begun = self._has_begun, False
            with self._update.progress.waits(f"step {step}, the sum of the gradients"):
                try:
                    if not has_begun:
                        self._sums.begin(step, early=False)
                    sync_report = self._sums.finish(is_last=report.is_last, shared=self._own_part())
                except PeerProtocolError:
                    raise
                except RunError:
                    self._members.wait_change(self._number)
                    continue
                self._count_sum(sync_report, report)
                if sync_report.repeats:
                    report.repeats += 1
                    self._begin_again()
                    continue
                digests = zip([group.number for group in self._groups], self._sums.digests(), strict=True)
                if self._members.vote(self._number, step, dict(digests), self._step_pace_s):
                    break
        report.is_last = sync_report.is_last
        parts = list(SHARED.iter_unpack(sync_report.shared))
        self._loss = sum(loss for loss, _, _ in parts)
        for _, loss, done in parts:
            if 0 < done <= step:
                self._best.note(done, loss)
        self._sums.apply()
        self._update.make(step, report)
        return False

    def close(self) -> None:
        """Ends the sums' threads and connections."""
        self._connections.close()
        super().close()

    # --- microbatches

    def _samples(self, step: int, share: IndexRange) -> tuple[Any, Any]:
        """Inputs and targets, on a pipeline's ends."""
        executor = self._executor
        if executor.stage_io.inputs is not None and not executor.is_last:
            return None, None
        return self._batches.once(step, share)

    def _take(self, share: IndexRange) -> None:
        self._executor.take_share(self._rank_batches.all_sizes[slice(*share)])
        self._seeder.first_microbatch = share[0]

    def _own_part(self) -> bytes:
        best = self._best
        own = SHARED.pack(self._executor.loss, best.loss, best.step)
        return b"".join(own if rank == self._rank else bytes(SHARED.size) for rank in self._places)

    def _begin_again(self) -> None:
        """Drops what was made of the step."""
        self._sums.start_step()
        self._executor.drop_losses()
        self._made = ()

    def _make_missing(self, step: int, report: StepReport) -> None:
        """Makes the microbatches that are this rank's now, and were not when it began the step."""
        held = self._members.held
        if held[: len(self._made)] != self._made:
            self._begin_again()
        missing = held[len(self._made) :]
        if missing:
            self._sums.end_microbatch()  # the last one's gradients are rounded by themselves, too
        for share in missing:
            self._members.left = share[1] - share[0]
            self._take(share)
            self._executor.add_microbatches(step, self._samples(step, share), report)
            self._made = (*self._made, share)
        self._members.left = 0

    def _note_pace(self, report: StepReport) -> None:
        self._step_pace_s = None
        if made := len(numbers_in(self._made)):
            self._step_pace_s = (report.forward_s + report.backward_s) / made
            self._paces.append(self._step_pace_s)
            self._members.pace_s = median(self._paces)

    # --- connections

    def _waits_for_members(self, step: int) -> AbstractContextManager[None]:
        """Inside, this rank waits for others: if all do for long, the launcher ends the attempt."""
        return self._update.progress.waits(f"step {step}, who goes on")

    def _is_connected(self, generation: Generation) -> bool:
        """Whether sums of that generation can be made now; connects for them if not."""
        if generation.number == self._number:
            if self._members.is_current(self._number):
                return True
            self._members.wait_change(self._number)
            return False
        self._sums.give_up()
        self._has_begun = False
        if self._sums.revert():
            self._begin_again()
            return False
        try:
            self._connections.renew(generation.number, generation.members)
        except RunError as exc:
            self._number = generation.number
            peer = getattr(exc, "peer_rank", None)
            if self._members.is_current(generation.number) and peer is not None:
                self._members.lose(peer)
            self._members.wait_change(generation.number)
            return False
        self._number = generation.number
        self._places = list(generation.members)
        groups = [self._among(group, generation) for group in self._groups]
        self._sums.reroute(groups, self._peers, SHARED.size * len(self._places))
        self._tell(generation)
        return True

    def _among(self, group: SumGroupOrder, generation: Generation) -> SumGroupOrder:
        joined = [rank for rank in generation.members if rank not in self._planned]
        routes = routes_among(self._order.routes[group.number], generation.members, joined)
        return replace(group, routes=tuple(place_on(route, self._rank) for route in routes))


def interrupt_in_thread(connections: SumConnections) -> Callable[[int], None]:
    """Returns a function that ends sums of a generation, without making its caller wait."""

    def interrupt(number: int) -> None:
        threading.Thread(target=connections.give_up, args=(number,), daemon=True, name="ends sums").start()

    return interrupt
