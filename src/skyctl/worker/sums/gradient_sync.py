"""Sums the gradients of pipelines side by side, layer by layer while the last backward still runs.

Each pipeline's gradients are of its own microbatches, weighted by their samples' share of the whole batch, so
their sum is the batch's gradient; nothing is averaged. The sums go over the plan's routes (``route_sum``),
the last layers first. A layer is summed as soon as the last microbatch's backward has passed it: gradients
are accumulated in the order of the layers, so once an earlier layer's is, no later layer's changes any more.

Stages of one pipeline that hold copies of a parameter which several layers share (tied embeddings) sum its
gradients in the same way, after their last backwards: a group with ``tie``, of those parameters alone.

Pipelines with cuts of their own sum in groups, the largest ranges of layers that the same ranks hold. A rank
is in the groups of its layers, and one of every pipeline is in each group. So all groups come to the same
verdict on whether a step is the last: a pipeline's ranks know of it from their forwards.

A gradient that is None stays None only where every replica has none. Batch norms train with the figures of
their own microbatches; their running figures are averaged before they are saved or validated with.

With ``powersgd:R`` gradients are summed in two passes, one after the other (``low_rank_gradients``).
With ``fixed32`` gradients are summed as integers (``summed_gradients``). If one did not fit, all replicas
know it before any of them uses the sum, and make the step again from the same batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.worker.peer import Peer
from skyctl.worker.rank_events import SumSizes
from skyctl.worker.rank_order import SumGroupOrder
from skyctl.worker.sums.batch_norm_stats import BatchNormStats, SavedBuffers, batch_norm_stats
from skyctl.worker.sums.group_sync import GroupSync
from skyctl.worker.sums.low_rank_gradients import LowRankGradients, seed_of
from skyctl.worker.sums.pass_layouts import rank_of
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_codecs import FIXED32
from skyctl.worker.sums.summed_gradients import (
    FloatGradients,
    IntegerGradients,
    KeptGradients,
    SummedGradients,
    TrainedParameter,
    check_summable,
    find_trained,
)
from skyctl.workload.mixed_precision import master_of

Tensor = torch.Tensor


class SyncReport(NamedTuple):
    """One step's sum, as one rank saw it.

    Attributes:
        idle_s: waiting for other replicas to end their backwards, from this rank's last one on.
        transfer_s: from then until the sum was there.
        is_last: some replica was told that the run ends with this step.
        repeats: nothing is summed: all replicas make the step's microbatches again.
        ahead: with a parameter server, by how many clocks this rank was ahead of the slowest then.
        shared: what replicas have shared beside it, the larger of each byte.
    """

    idle_s: float
    transfer_s: float
    is_last: bool
    repeats: bool
    ahead: int | None = None
    shared: bytes = b""

    @property
    def sync_s(self) -> float:
        """From this rank's last backward to the end of the sum."""
        return self.idle_s + self.transfer_s


class GradientSync:
    """One stage's part in each step's sum.

    ``start_step`` before its microbatches, ``end_microbatch`` after each backward but the last, ``begin``
    before that, ``finish`` after it.

    Attributes:
        by_microbatch: whether gradients are taken after each microbatch, and a step may have to be repeated.

    Args:
        layers: the stage's, [start, start + len(layers)) of the model.
        groups: those of its layers, or of parameters it shares.
        peers: the connections to every rank on their routes, by rank.
        format: what gradients are sent as (``sum_codecs``).
        chunk_bytes: the most bytes of gradients in a message, in that format.
        share: of the step's microbatches that this pipeline computes.
        microbatches: of the whole step; asked for by ``fixed32``.
        tied: by ``tie`` of a group, the layers that share them, the parameters; their gradients are summed.
        uncompressed_steps: with ``powersgd:R``, so many at the run's start are summed whole.
        seed: the run's.
        shared_bytes: how many replicas share beside each sum.
        keeps: sums are made of copies, so that they can be made again (``reroute``), and wait for ``apply``.

    Raises:
        RunError: several groups and ``fixed32``: they would not make a step again together.
        WorkloadError: a layer's gradients are sparse or complex, and can't be summed.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        start: int,
        groups: Sequence[SumGroupOrder],
        peers: Mapping[int, Peer],
        *,
        format: str = "float32",  # noqa: A002 — as the plan calls it
        chunk_bytes: int = 262144,
        share: float,
        microbatches: int = 1,
        tied: Mapping[tuple[int, ...], Sequence[nn.Parameter]] | None = None,
        uncompressed_steps: int = 0,
        seed: int = 0,
        keeps: bool = False,
        shared_bytes: int = 0,
    ) -> None:
        if format == FIXED32 and len(groups) > 1:
            raise RunError(f"{FIXED32} sums one group of layers, and this rank is in {len(groups)}")
        trained: list[TrainedParameter] = []
        hooked: list[tuple[int, nn.Parameter]] = []
        if any(group.tie is None for group in groups):
            check_summable(layers)
            trained, hooked = find_trained(layers), _parameters_of_one_layer(layers)
        self.by_microbatch = format == FIXED32
        self._stage_layers = list(layers)
        self._saved_buffers: SavedBuffers | None = None
        self._travel_s = 2 * max((peer.latency_s for peer in peers.values()), default=0.0)
        self._watching, self._reached, self._layers = False, 0, len(layers)
        self._groups: list[GroupSync] = []
        for group in groups:
            figures: list[BatchNormStats] = []
            if group.tie is not None:
                first = 0
                by_layer = [[TrainedParameter(0, master_of(p)) for p in (tied or {})[group.tie]]]
            else:
                first, stop = group.start - start, group.stop - start
                by_layer = [[p for p in trained if p.layer == layer] for layer in range(first, stop)]
                figures = [figure for layer in layers[first:stop] for figure in batch_norm_stats(layer)]
            by_layer.reverse()  # the order in which they become ready
            parameters = [parameter for layer in by_layer for parameter in layer]
            gradients: SummedGradients
            if (rank := rank_of(format)) is not None:
                seeds = [seed_of(seed, start, parameter, trained) for parameter in parameters]
                gradients = LowRankGradients(parameters, rank, seeds, uncompressed_steps)
            elif format == FIXED32:
                gradients = IntegerGradients(parameters, microbatches)
            else:
                gradients = FloatGradients(parameters)
            if keeps:
                gradients = KeptGradients(gradients)
            self._groups.append(
                GroupSync(
                    RouteSum.from_order(group, peers),
                    by_layer,
                    gradients,
                    first,
                    figures,
                    format=format,
                    chunk_bytes=chunk_bytes,
                    share=share,
                    uncompressed_steps=uncompressed_steps,
                    shared_bytes=shared_bytes,
                )
            )
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(layer))  # type: ignore[no-untyped-call]
            for layer, parameter in hooked
        ]

    @property
    def sizes(self) -> SumSizes:
        """The sizes of the first group's sums, which a helper has to know."""
        return self._groups[0].sizes

    @property
    def ended_by(self) -> int | None:
        """The rank that was first to say that the run ends; None: nobody has, or this rank has itself."""
        return next((rank for group in self._groups if (rank := group.sums.ended_by) is not None), None)

    def start_step(self) -> None:
        """The step's first forward is next."""
        if self.by_microbatch:
            self._saved_buffers = SavedBuffers(self._stage_layers)
        for group in self._groups:
            group.gradients.restart()

    def end_microbatch(self) -> None:
        """A backward is over that was not the step's last."""
        for group in self._groups:
            group.gradients.end_microbatch()

    def begin(self, step: int, *, early: bool = True) -> None:
        """The step's last backward is next.

        Args:
            early: layers are summed as soon as it has passed them; False: all of them after it.
        """
        for group in self._groups:
            group.begin(step)
        self._watching, self._reached = early, self._layers

    def finish(self, *, is_last: bool, shared: bytes = b"") -> SyncReport:
        """The last backward is over: returns once all gradients are the sums of all replicas'.

        Or once all replicas know that the step must be made again; its layers' buffers are then as they were.

        Args:
            is_last: whether this pipeline was told that the run ends with this step.
            shared: what is this rank's to share, 0 in the places of others; of ``shared_bytes``.

        Raises:
            PeerLostError: a replica is gone.
            RunError: a replica has sent something else than what was expected.
            WorkloadError: a gradient is sparse.
        """
        ended = time.perf_counter()
        self._watching = False
        for group in self._groups:
            group.add_ready(0)
        # all ranks in one order, or they would wait for each other; last layers' replicas are done first
        agreed = [group.agree(is_last, shared) for group in reversed(self._groups)]
        announced = time.perf_counter()
        for group in self._groups:
            group.finish()
        repeats = any(group.repeats for group in self._groups)
        if repeats and self._saved_buffers is not None:
            self._saved_buffers.restore()
        waited_s = announced - ended
        travelling_s = min(waited_s, self._travel_s)
        transfer_s = time.perf_counter() - announced + travelling_s
        ends = any(is_last for is_last, _ in agreed)
        return SyncReport(waited_s - travelling_s, transfer_s, ends, repeats, shared=agreed[0][1])

    @property
    def has_figures(self) -> bool:
        """Whether there are norms with running figures, which are averaged now and then."""
        return any(group.has_figures for group in self._groups)

    def give_up(self) -> None:
        """Ends the sum under way, whose connections are closed; ``reroute`` has yet to follow."""
        self._watching = False
        for group in self._groups:
            group.give_up()

    def mark_step(self) -> None:
        """A step begins, whose sum may have to be made again by fewer ranks."""
        for kept in self._kept:
            kept.mark_step()

    def revert(self) -> bool:
        """Ranks are to share what they shared as the step began; whether its microbatches are made again."""
        reverted = [kept.revert() for kept in self._kept]  # every one of them
        return any(reverted)

    def reroute(self, groups: Sequence[SumGroupOrder], peers: Mapping[int, Peer], shared_bytes: int) -> None:
        """From now on groups sum over other routes, with what ranks had of their own.

        Args:
            groups: as in an order.
            peers: the new connections to every rank on their routes, by rank.
            shared_bytes: how many bytes replicas share beside each sum now.
        """
        for group, order in zip(self._groups, groups, strict=True):
            group.reroute(RouteSum.from_order(order, peers), shared_bytes)

    def digests(self) -> list[str]:
        """By group, of its sum's bytes, 32 hexadecimal digits; after ``finish``, where sums are of copies."""
        return [kept.digest() for kept in self._kept]

    def shared_state(self) -> bytes:
        """The state that ranks shared for sums as the step began, beside weights: for one that joins."""
        return json.dumps([kept.shared_state() for kept in self._kept]).encode()

    def take_shared_state(self, told: bytes) -> None:
        """Takes over what other ranks share, before the first step. Raises ValueError where it is none."""
        states = json.loads(told)
        if not isinstance(states, list) or len(states) != len(self._kept):
            raise ValueError("it is not of as many groups")
        for kept, state in zip(self._kept, states, strict=True):
            kept.take_shared_state(state)

    def apply(self) -> None:
        """Puts sums of copies where optimizers look for them."""
        for kept in self._kept:
            kept.apply()

    @property
    def _kept(self) -> list[KeptGradients]:
        return [group.gradients for group in self._groups if isinstance(group.gradients, KeptGradients)]

    def average_figures(self, step: int) -> None:
        """Gives every replica the mean of all replicas' running figures, weighted by microbatches.

        How many batches a norm has seen becomes the number that all have seen together.
        """
        for group in self._groups:
            group.average_figures(step)

    def reset_residuals(self) -> None:
        """Drops what a run that resumes here would not have, such as residuals: it is to go on alike."""
        for group in self._groups:
            group.gradients.reset_residuals()

    def close(self) -> None:
        """Ends the threads; the connections must be closed before."""
        self._watching = False
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            group.close()

    def _make_hook(self, layer: int) -> Callable[[Tensor], None]:
        def hook(_parameter: Tensor) -> None:
            if self._watching and layer + 1 < self._reached:
                self._reached = layer + 1
                for group in self._groups:
                    group.add_ready(layer + 1)

        return hook


def _parameters_of_one_layer(layers: Sequence[nn.Module]) -> list[tuple[int, nn.Parameter]]:
    """(layer, parameter) of what only one layer has: once its gradient is there, later layers are done."""
    users: dict[int, set[int]] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(number)
    return [
        (number, parameter)
        for number, layer in enumerate(layers)
        for parameter in layer.parameters()
        if parameter.requires_grad and len(users[id(parameter)]) == 1
    ]
