"""The sums of one group of layers: their gradients bucket by bucket, and their norms' running figures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyctl.worker.rank_events import SumSizes
from skyctl.worker.sums.batch_norm_stats import BatchNormStats, average_figures
from skyctl.worker.sums.low_rank_gradients import pass_numels
from skyctl.worker.sums.pass_layouts import Numels, PassLayouts, buckets_of, rank_of
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_codecs import chunk_numel
from skyctl.worker.sums.sum_layout import SumLayout, make_layout
from skyctl.worker.sums.sum_messages import FACTORS, GRADIENTS
from skyctl.worker.sums.sum_work import SumWork
from skyctl.worker.sums.summed_gradients import AGREED_FLAGS, SummedGradients, TrainedParameter

Tensor = torch.Tensor

_ANY_BYTE = 255


class GroupSync:
    """The sums of one group: whose gradients, in which order.

    Attributes:
        sums: where they are made.
        parameters: in the order in which their gradients are summed.
        gradients: of its parameters, as backwards leave them.
        repeats: whether ranks have agreed to make the step again.

    Args:
        layers: by layer its parameters, the last layer first, as they become ready.
        first: the number of the first of these layers, counted from the stage's first.
        figures: running figures of the norms in these layers.
        format, chunk_bytes, share, uncompressed_steps, shared_bytes: as of ``GradientSync``.
    """

    def __init__(
        self,
        sums: RouteSum,
        layers: Sequence[Sequence[TrainedParameter]],
        gradients: SummedGradients,
        first: int,
        figures: Sequence[BatchNormStats],
        *,
        format: str,  # noqa: A002 — as the plan calls it
        chunk_bytes: int,
        share: float,
        uncompressed_steps: int,
        shared_bytes: int = 0,
    ) -> None:
        self.sums, self.gradients = sums, gradients
        self.parameters = [parameter for layer in layers for parameter in layer]
        self._first, self._figures, self._share = first, list(figures), share
        self.repeats = False
        self._shared_bytes = shared_bytes
        self._sizes = _sizes_of(layers, rank_of(format))
        self._numels = self._sizes[0]
        self._format, self._chunk_bytes = format, chunk_bytes
        self._uncompressed_steps = uncompressed_steps
        self._cut_for_routes()
        self._sum_work: SumWork | None = None
        self._taken_count = self._ready_layers = 0
        self._open: list[Tensor] = []
        self._codes = b""

    @property
    def has_figures(self) -> bool:
        """Whether norms of its layers have running figures."""
        return bool(self._figures)

    def give_up(self) -> None:
        """Ends the sum under way, whose connections are closed; ``reroute`` has yet to follow."""
        self.sums.close()
        self.sums.join()

    def reroute(self, sums: RouteSum, shared_bytes: int) -> None:
        """From now on sums go over other routes, and ranks share so many bytes beside each."""
        self.sums, self._shared_bytes = sums, shared_bytes
        self._cut_for_routes()

    def _cut_for_routes(self) -> None:
        """Cuts what is summed into chunks, by the shares of the routes."""
        shares = [route.share for route in self.sums.routes]
        self._passes = PassLayouts(
            self._format, self._chunk_bytes, shares, *self._sizes, self._uncompressed_steps
        )
        self._empty_layout = make_layout([], shares, 1)
        self._figures_layout: SumLayout | None = None
        if self._figures:
            numels = [figure.numel for figure in self._figures]
            self._figures_layout = make_layout([numels], shares, chunk_numel("float32", self._chunk_bytes))

    @property
    def sizes(self) -> SumSizes:
        """The sizes that a helper has to know: how many numbers are summed, and in how many tensors."""
        figures = sum(figure.numel for figure in self._figures)
        whole, first, second = (tuple(map(sum, numels)) for numels in self._sizes)
        return SumSizes(whole, sum(map(len, self._numels)), figures, first, second)

    def begin(self, step: int) -> None:
        """The step's sum begins; each layer joins it with ``add_ready``."""
        self.gradients.begin(step)
        layout = self._passes.first(step) if self.gradients.is_summable else self._empty_layout
        agreed_bytes = AGREED_FLAGS + len(self.parameters) + self._shared_bytes
        self.sums.begin(self._make_sum(layout, step), agreed_bytes)

    def take_aside(self, step: int, gradients: SummedGradients) -> SumWork:
        """A sum, to be begun later, of gradients of ``parameters`` that won't change any more."""
        kept, self.gradients = self.gradients, gradients
        sum_work = self._make_sum(self._passes.first(step), step)
        self.add_ready(0)
        self.gradients = kept
        return sum_work

    def _make_sum(self, layout: SumLayout, step: int) -> SumWork:
        self._sum_work = sum_work = SumWork(layout, step, kind=GRADIENTS, format=self._passes.format)
        self._open, self._taken_count, self._ready_layers = [], 0, 0
        return sum_work

    def add_ready(self, layer: int) -> None:
        """The gradients of the stage's layers from that one on won't change any more."""
        assert self._sum_work is not None
        ready = min(len(self._numels), len(self._numels) - (layer - self._first))
        while self._ready_layers < ready:
            for _ in self._numels[self._ready_layers]:
                self._open.append(self.gradients.take(self._taken_count))
                self._taken_count += 1
            while self._is_bucket_full():
                self._sum_work.add_bucket(self._open)
                self._open = []
            self._ready_layers += 1

    def agree(self, is_last: bool, shared: bytes = b"") -> tuple[bool, bytes]:
        """Whether any replica ends with this step, and all replicas' ``shared``, the larger of each byte.

        All else that is agreed on is kept for ``finish``.
        """
        own = bytes([is_last, self.gradients.overflows(), *self.gradients.codes(), *shared])
        agreed = self.sums.agree(own, _ANY_BYTE if shared else self.gradients.largest_code)
        codes_end = AGREED_FLAGS + len(self.parameters)
        self.repeats, self._codes = bool(agreed[1]), agreed[AGREED_FLAGS:codes_end]
        return bool(agreed[0]), agreed[codes_end:]

    def finish(self) -> None:
        """Waits for the sum, and puts it where it is not in place already, or has the step made again."""
        assert self._sum_work is not None
        self._sum_work.wait()
        if self.repeats:
            self.gradients.repeat(self._codes)
            return
        if (layout := self._passes.second(self._sum_work.step)) is not None:
            again = SumWork(layout, self._sum_work.step, kind=FACTORS, format=self._passes.format)
            self.sums.begin(again)
            tensors = iter(self.gradients.second_pass(self._codes))
            layers = [[next(tensors) for _ in layer] for layer in self._sizes[2]]
            for bucket in buckets_of(layout, layers):
                again.add_bucket(bucket)
            again.wait()
        self.gradients.finish(self._codes)

    def average_figures(self, step: int) -> None:
        """As ``GradientSync.average_figures``."""
        if self._figures_layout is not None:
            average_figures(self.sums, self._figures_layout, self._figures, self._share, step)

    def close(self) -> None:
        """Nothing is summed any more."""
        self.sums.close()

    def _is_bucket_full(self) -> bool:
        assert self._sum_work is not None
        bucket = self._sum_work.ready_buckets
        ends = self._sum_work.layout.last_layer_of
        return bucket < len(ends) and ends[bucket] == self._ready_layers


def _sizes_of(
    layers: Sequence[Sequence[TrainedParameter]], rank: int | None
) -> tuple[Numels, Numels, Numels]:
    """By layer, the elements of each tensor that is summed: whole gradients, and both compressed passes."""
    whole = [[parameter.master.numel() for parameter in layer] for layer in layers]
    if rank is None:
        return whole, [], []
    passes = [[pass_numels(parameter.master.shape, rank) for parameter in layer] for layer in layers]
    first = [[sizes[0] for sizes in layer] for layer in passes]
    return whole, first, [[sizes[1] for sizes in layer if sizes[1]] for layer in passes]
