"""A worker of a parameter server: in the place of a sum it pushes its gradients and pulls weights.

A worker is a replica; its clock is its step. It computes the gradient of its share of a step's batch,
weighted by the samples' share of the whole batch, with the weights that it pulled last. The root
(``parameter_root``) is the first rank, which computes as well: it serves each other worker in a thread of
its own.

Optimizers, their state and the learning rate are the root's; clipping is of each worker's own gradients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from skyctl.errors import RunError, WorkloadError
from skyctl.worker.checkpointer import Checkpointer
from skyctl.worker.peer import FIRST_SUM_TAG, Peer
from skyctl.worker.rank_events import SumSizes
from skyctl.worker.rank_order import RankOrder, SumOrder
from skyctl.worker.sums.batch_norm_stats import average_figures, batch_norm_stats
from skyctl.worker.sums.gradient_sync import SyncReport
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_codecs import chunk_numel
from skyctl.worker.sums.sum_layout import make_layout
from skyctl.worker.sums.summed_gradients import check_dense, find_trained
from skyctl.worker.updates.parameter_root import Grant, ParameterRoot, RootWeights
from skyctl.worker.updates.push_pull import Push, PushPull
from skyctl.workload.mixed_precision import accumulate_into_master, master_of
from skyctl.workload.parameter_names import weight_name
from skyctl.workload.recipe import Recipe

Tensor = torch.Tensor
_ROUTE_TAGS = 4
"""Of the group's only route, which running figures are summed over; pushes and pulls have those after."""


class StaleSync:
    """One worker's pushes and pulls, which the executor and the training loop call as a ``GradientSync``.

    Attributes:
        by_microbatch: False: gradients are taken after a step's last backward.
        ended_by: the rank that was first to tell this one that the run ends; None: nobody has, or this rank
            has wanted it itself.

    Args:
        layers: all of the model's.
        rank: this worker's.
        sync: the sums of the rank's order, with a staleness.
        peers: at the root all other workers, elsewhere the root, by rank.
        share: of the step's microbatches that this worker computes.
        first, steps: it makes clocks [first, steps).
        root: the clocks and the weights, where this rank is the root.

    Raises:
        WorkloadError: a trained parameter is not float32.
    """

    by_microbatch = False

    def __init__(
        self,
        layers: Sequence[nn.Module],
        rank: int,
        sync: SumOrder,
        peers: Mapping[int, Peer],
        *,
        share: float,
        first: int,
        steps: int,
        root: ParameterRoot | None,
    ) -> None:
        (group,) = sync.groups
        assert sync.staleness is not None, "else it is a GradientSync"
        self._rank, self._share, self._steps, self._root = rank, share, steps, root
        self._staleness = sync.staleness.most
        self._parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
        self._masters = [trained.master for trained in find_trained(layers)]
        for master in self._masters:
            if master.dtype != torch.float32:
                raise WorkloadError(
                    f"{weight_name(master) or 'a parameter'} is {master.dtype}".replace("torch.", "")
                    + "; with --staleness weights travel as float32",
                    hint="leave --staleness out",
                )
        numel = sum(master.numel() for master in self._masters)
        self._numbers = torch.zeros(numel, dtype=torch.float32)
        self._clock = first
        self.ended_by: int | None = None
        self._has_ended = False
        self._figures = [figure for layer in layers for figure in batch_norm_stats(layer)]
        tag, chunk_bytes = FIRST_SUM_TAG + group.first_tag, sync.chunk_bytes
        self._figures_layout = make_layout(
            [[figure.numel for figure in self._figures]], [1.0], chunk_numel("float32", chunk_bytes)
        )
        self._sums = RouteSum.from_order(group, peers) if self._figures else None
        self._lines = {
            rank_of_peer: PushPull(
                peer,
                group=group.number,
                first_tag=tag + _ROUTE_TAGS,
                numel=numel,
                parameters=len(self._masters),
                chunk_bytes=chunk_bytes,
            )
            for rank_of_peer, peer in peers.items()
        }
        self._serving: list[threading.Thread] = []
        if root is not None:
            root.copy_weights(self._numbers)
            self._set_weights()  # what was read from a checkpoint
            self._serving = [
                threading.Thread(
                    target=self._serve, args=(root, peer, first), daemon=True, name=f"serves {peer}"
                )
                for peer in self._lines
            ]
            for thread in self._serving:
                thread.start()

    @property
    def sizes(self) -> SumSizes:
        """How many numbers a push has: those of all trained parameters."""
        return SumSizes((self._numbers.numel(),), len(self._masters), 0)

    def start_step(self) -> None:
        """The step's first forward is next."""
        if self._root is not None:
            self._root.resume()

    def end_microbatch(self) -> None:
        """Nothing: backwards accumulate."""

    def begin(self, step: int, *, early: bool = True) -> None:  # noqa: ARG002
        """The step's last backward is next."""
        self._clock = step

    def finish(self, *, is_last: bool) -> SyncReport:
        """The last backward is over: pushes the gradients, and returns with the weights of the next clock.

        Args:
            is_last: whether this worker was told that the run is to end.

        Raises:
            PeerLostError: the root, or at the root another worker, is gone.
            RunError: it has sent something else than what was expected.
            WorkloadError: a gradient is sparse.
        """
        began = time.perf_counter()
        push = Push(is_last, self._take_gradients())
        self._has_ended |= is_last
        if self._root is not None:
            self._root.push(self._rank, self._clock, self._numbers, push.present, wants_end=push.wants_end)
            grant = self._root.take_grant(self._rank, self._numbers)
            teller = self._root.ended_by
            if self._root.is_last(self._clock):
                self._end_serving(self._root)
        else:
            ((teller, line),) = self._lines.items()
            line.send_push(self._clock, push, self._numbers)
            grant = line.receive_answer(
                self._clock, self._numbers, staleness=self._staleness, steps=self._steps
            )
        if grant.end is not None and not self._has_ended:
            self._has_ended, self.ended_by = True, teller
        self._set_weights()
        waited_s = time.perf_counter() - began
        held_s = min(grant.held_s, waited_s)
        ahead = self._clock + 1 - grant.slowest
        return SyncReport(held_s, waited_s - held_s, grant.end == self._clock, repeats=False, ahead=ahead)

    def average_figures(self, step: int) -> None:
        """As ``GradientSync.average_figures``; all workers have just met."""
        if self._sums is not None:
            average_figures(self._sums, self._figures_layout, self._figures, self._share, step)

    def reset_residuals(self) -> None:
        """Nothing is kept that a run that resumes would not have."""

    def close(self) -> None:
        """Ends the threads; the connections must be closed before."""
        if self._root is not None:
            self._root.fail(RunError("the run was given up"))
        for thread in self._serving:
            thread.join()
        if self._sums is not None:
            self._sums.close()

    def _take_gradients(self) -> bytes:
        """Moves the gradients into the buffer; by parameter, 1 where there was one."""
        at, present = 0, bytearray()
        for parameter in self._parameters:
            accumulate_into_master(parameter)
        for master in self._masters:
            gradient, part = master.grad, self._numbers[at : at + master.numel()]
            at += master.numel()
            present.append(gradient is not None)
            if gradient is None:
                part.zero_()
                continue
            check_dense(master, gradient)
            part.copy_(gradient.detach().reshape(-1))
            master.grad = None
        return bytes(present)

    def _set_weights(self) -> None:
        at = 0
        with torch.no_grad():
            for master in self._masters:
                master.copy_(self._numbers[at : at + master.numel()].view(master.shape))
                at += master.numel()
            for parameter in self._parameters:
                if (master := master_of(parameter)) is not parameter:
                    parameter.copy_(master)

    def _serve(self, root: ParameterRoot, peer: int, first: int) -> None:
        """One other worker's pushes and answers, to the end of the run."""
        line, numbers = self._lines[peer], torch.zeros_like(self._numbers)
        try:
            for clock in range(first, self._steps):
                push = line.receive_push(clock, numbers)
                root.push(peer, clock, numbers, push.present, wants_end=push.wants_end)
                grant: Grant = root.take_grant(peer, numbers)
                line.send_answer(clock, grant, numbers)
                if root.is_last(clock):
                    return
        except BaseException as exc:  # noqa: BLE001 — raised where the root's own worker meets it
            root.fail(exc)

    def _end_serving(self, root: ParameterRoot) -> None:
        """Returns once every other worker has its last answer."""
        for thread in self._serving:
            thread.join()
        root.check()


def is_stale(order: RankOrder) -> bool:
    """Whether the rank pushes its gradients to a parameter server."""
    return order.sync is not None and order.sync.staleness is not None


def is_root(order: RankOrder) -> bool:
    """Whether the rank holds the weights for all: with a parameter server the first one does."""
    return is_stale(order) and order.world.rank == 0


def leave_to_root(optimizer: torch.optim.Optimizer | None) -> None:
    """Makes a worker's optimizer one that has rates only: it was restored with the weights."""
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.step()  # without gradients: else torch warns of rates that move before any step


def make_stale_sync(
    order: RankOrder,
    sync: SumOrder,
    layers: Sequence[nn.Module],
    peers: Mapping[int, Peer],
    weights: RootWeights | None,
    *,
    share: float,
    first: int,
    recipe: Recipe,
    checkpointer: Checkpointer | None,
) -> StaleSync:
    """A rank's part, from its order, whose ``sync`` has a staleness.

    Args:
        weights: where this rank is the root.
        share, first: as ``StaleSync`` has them.
        recipe, checkpointer: all workers meet before validations and checkpoints.
    """

    def meets_after(clock: int) -> bool:
        saves = checkpointer is not None and checkpointer.due(clock + 1, early=False, last=False)
        return saves or recipe.validates(clock, last=False)

    rank, steps = order.world.rank, order.steps
    assert sync.staleness is not None
    root = None
    if weights is not None:
        most, workers = sync.staleness.most, [rank, *peers]
        root = ParameterRoot(
            weights, workers, staleness=most, first=first, steps=steps, meets_after=meets_after
        )
    return StaleSync(layers, rank, sync, peers, share=share, first=first, steps=steps, root=root)
