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

A gradient that is None stays None only where every holder has none. Batch norms train with the figures of
their own microbatches; their running figures are averaged before they are saved or validated with.

With ``fixed32`` gradients are summed as integers (``summed_gradients``). Where one did not fit, all holders
know it before any of them uses the sum, and make the step again from the same batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.transport.peer_connection import FIRST_TAG
from skyctl.worker.rank_events import SumSizes
from skyctl.worker.route_sum import RoutePlace, RouteSum, SumRound
from skyctl.worker.running_figures import RunningFigures, SavedBuffers, running_figures
from skyctl.worker.stage_io import Neighbour
from skyctl.worker.sum_codecs import FIXED32, chunk_numel
from skyctl.worker.sum_layout import SumLayout, make_layout
from skyctl.worker.sum_messages import FIGURES, GRADIENTS
from skyctl.worker.summed_gradients import (
    AGREED_FLAGS,
    FloatGradients,
    IntegerGradients,
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
        idle_s: waiting for other holders to end their backwards, from this rank's last one on.
        transfer_s: from then until the sum was there.
        is_last: some holder was told that the run ends with this step.
        repeats: nothing is summed: all holders make the step's microbatches again.
        ahead: with a parameter server, by how many clocks this rank was ahead of the slowest then.
    """

    idle_s: float
    transfer_s: float
    is_last: bool
    repeats: bool
    ahead: int | None = None

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
        updates_weights: False: the optimizer does that, once gradients are summed.

    Args:
        layers: the stage's, [start, start + len(layers)) of the model.
        groups: ``sync.groups`` of the rank's payload: those of its layers, or of parameters it shares.
        peers: the connections to every rank on their routes, by rank.
        format: what gradients are sent as (``sum_codecs``).
        chunk_bytes: the most bytes of gradients in a message, in that format.
        share: of the step's microbatches that this pipeline computes.
        microbatches: of the whole step; asked for by ``fixed32``.
        tied: by ``tie`` of a group, the layers that share them, the parameters; their gradients are summed.

    Raises:
        RunError: several groups and ``fixed32``: they would not make a step again together.
        WorkloadError: a layer's gradients are sparse or complex, and can't be summed.
    """

    updates_weights = False

    def __init__(
        self,
        layers: Sequence[nn.Module],
        start: int,
        groups: Sequence[Mapping[str, Any]],
        peers: Mapping[int, Neighbour],
        *,
        format: str = "float32",  # noqa: A002 — as the plan calls it
        chunk_bytes: int = 262144,
        share: float,
        microbatches: int = 1,
        tied: Mapping[tuple[int, ...], Sequence[nn.Parameter]] | None = None,
    ) -> None:
        if format == FIXED32 and len(groups) > 1:
            raise RunError(f"{FIXED32} sums one group of layers, and this rank is in {len(groups)}")
        trained: list[TrainedParameter] = []
        hooked: list[tuple[int, nn.Parameter]] = []
        if any("tie" not in values for values in groups):
            check_summable(layers)
            trained, hooked = find_trained(layers), _parameters_of_one_layer(layers)
        self.by_microbatch = format == FIXED32
        self._stage_layers = list(layers)
        self._saved_buffers: SavedBuffers | None = None
        self._travel_s = 2 * max((peer.latency_s for peer in peers.values()), default=0.0)
        self._watching, self._reached, self._layers = False, 0, len(layers)
        connections = {rank: peer.connection for rank, peer in peers.items()}
        self._groups: list[_GroupSync] = []
        for values in groups:
            number, routes = int(values["number"]), [RoutePlace.from_payload(x) for x in values["routes"]]
            tag = FIRST_TAG + int(values["first_tag"])
            if "tie" in values:
                first, sums = 0, RouteSum(number, routes, connections, tag)
                by_layer = [[TrainedParameter(0, master_of(p)) for p in (tied or {})[tuple(values["tie"])]]]
                figures = []
            else:
                first, stop = int(values["start"]) - start, int(values["stop"]) - start
                agreement = RoutePlace.from_payload(values["agreement"]) if "agreement" in values else None
                sums = RouteSum(number, routes, connections, tag, agreement)
                by_layer = [[p for p in trained if p.layer == layer] for layer in range(first, stop)]
                figures = [figure for layer in layers[first:stop] for figure in running_figures(layer)]
            self._groups.append(
                _GroupSync(sums, by_layer, first, figures, format, chunk_bytes, share, microbatches)
            )
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(layer))  # type: ignore[no-untyped-call]
            for layer, parameter in hooked
        ]

    @property
    def sizes(self) -> SumSizes:
        """What a helper has to know of the sums of the first group."""
        return self._groups[0].sizes

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

    def finish(self, *, is_last: bool) -> SyncReport:
        """The last backward is over: returns once all gradients are the sums of all holders'.

        Or once all holders know that the step must be made again; its layers' buffers are then as they were.

        Args:
            is_last: whether this pipeline was told that the run ends with this step.

        Raises:
            PeerLostError: a holder is gone.
            RunError: a holder has sent something else than what was expected.
            WorkloadError: a gradient is sparse.
        """
        ended = time.perf_counter()
        self._watching = False
        for group in self._groups:
            group.add_ready(0)
        # all ranks in one order, or they would wait for each other; last layers' holders are done first
        agreed = [group.agree(is_last) for group in reversed(self._groups)]
        announced = time.perf_counter()
        for group in self._groups:
            group.finish()
        repeats = any(group.repeats for group in self._groups)
        if repeats and self._saved_buffers is not None:
            self._saved_buffers.restore()
        waited_s = announced - ended
        travelling_s = min(waited_s, self._travel_s)
        transfer_s = time.perf_counter() - announced + travelling_s
        return SyncReport(waited_s - travelling_s, transfer_s, any(agreed), repeats)

    def average_figures(self, step: int) -> None:
        """Gives every holder the mean of all holders' running figures, weighted by microbatches.

        How many batches a norm has seen becomes the number that all have seen together.
        """
        for group in self._groups:
            group.average_figures(step)

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


class _GroupSync:
    """The sums of one group: whose gradients, in which order.

    Attributes:
        gradients: of its parameters, in the order in which they are summed.
        repeats: whether ranks have agreed to make the step again.
    """

    def __init__(
        self,
        sums: RouteSum,
        layers: Sequence[Sequence[TrainedParameter]],
        first: int,
        figures: Sequence[RunningFigures],
        format: str,  # noqa: A002 — as the plan calls it
        chunk_bytes: int,
        share: float,
        microbatches: int,
    ) -> None:
        self._sums, self._format, self._share, self._figures = sums, format, share, list(figures)
        self._first = first
        layers = list(reversed(layers))  # in the order in which they become ready
        parameters = [parameter for layer in layers for parameter in layer]
        self.gradients: SummedGradients = (
            IntegerGradients(parameters, microbatches) if format == FIXED32 else FloatGradients(parameters)
        )
        self.repeats = False
        self._shares = [route.share for route in sums.routes]
        self._numels = [[parameter.master.numel() for parameter in layer] for layer in layers]
        self._layout = make_layout(self._numels, self._shares, chunk_numel(format, chunk_bytes))
        self._empty_layout = make_layout([], self._shares, 1)
        self._figures_layout: SumLayout | None = None
        if self._figures:
            found = [figure.numel for figure in self._figures]
            self._figures_layout = make_layout([found], self._shares, chunk_numel("float32", chunk_bytes))
        self._round: SumRound | None = None
        self._taken_count = self._ready_layers = 0
        self._open: list[Tensor] = []
        self._codes = b""

    @property
    def sizes(self) -> SumSizes:
        """What a helper has to know of them."""
        figures = sum(figure.numel for figure in self._figures)
        return SumSizes(tuple(map(sum, self._numels)), sum(map(len, self._numels)), figures)

    def begin(self, step: int) -> None:
        layout = self._layout if self.gradients.is_summable else self._empty_layout
        self._round = SumRound(layout, step, kind=GRADIENTS, format=self._format)
        self._open, self._taken_count, self._ready_layers = [], 0, 0
        self._sums.begin(self._round, AGREED_FLAGS + sum(map(len, self._numels)))

    def add_ready(self, layer: int) -> None:
        """The gradients of the stage's layers from that one on won't change any more."""
        assert self._round is not None
        ready = min(len(self._numels), len(self._numels) - (layer - self._first))
        while self._ready_layers < ready:
            for _ in self._numels[self._ready_layers]:
                self._open.append(self.gradients.take(self._taken_count))
                self._taken_count += 1
            while self._is_bucket_full():
                self._round.add_bucket(self._open)
                self._open = []
            self._ready_layers += 1

    def agree(self, is_last: bool) -> bool:
        """Whether any holder ends with this step; what else is agreed on is kept for ``finish``."""
        own = bytes([is_last, self.gradients.overflows(), *self.gradients.codes()])
        agreed = self._sums.agree(own, self.gradients.largest_code)
        self.repeats, self._codes = bool(agreed[1]), agreed[AGREED_FLAGS:]
        return bool(agreed[0])

    def finish(self) -> None:
        """Waits for the sum, and puts it where it is not in place already, or has the step made again."""
        assert self._round is not None
        self._round.wait()
        if self.repeats:
            self.gradients.repeat(self._codes)
        else:
            self.gradients.finish(self._codes)

    def average_figures(self, step: int) -> None:
        """As ``GradientSync.average_figures``."""
        if self._figures_layout is None:
            return
        round_ = SumRound(self._figures_layout, step, kind=FIGURES)
        values = [figure.weighted(self._share) for figure in self._figures]
        self._sums.begin(round_)
        round_.add_bucket(values)
        round_.wait()
        for figure, summed in zip(self._figures, values, strict=True):
            figure.set(summed)

    def close(self) -> None:
        self._sums.close()

    def _is_bucket_full(self) -> bool:
        assert self._round is not None
        bucket = self._round.ready_buckets
        ends = self._round.layout.last_layer_of
        return bucket < len(ends) and ends[bucket] == self._ready_layers


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
