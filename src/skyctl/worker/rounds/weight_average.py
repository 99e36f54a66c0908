"""Averages the weights of pipelines at a round's end, by the samples that each has trained on.

Every replica puts n · w in the place of its weights w, n being its samples of the round. Over the plan's
routes (``route_sum``) these become the sums of all replicas, with Σn behind them, and all divide by it. So
all replicas end with the same bytes. One that has nothing to give has n = 0, and takes what the others give.
If Σn is 0 there are no weights left: the caller restores those that the round began with.

In a format that rounds (``records.sync_format.ROUNDED_FORMATS``) there are two sums: first Σn as float32,
then n / Σn · (w − w₀), w₀ being the weights that the round began with, the same on all replicas. A replica
adds what its encoding loses of a partial sum to its part of the next round's (error feedback: Seide et
al., *1-Bit Stochastic Gradient Descent*, Interspeech 2014).

Running figures of batch norms are averaged with Σn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from skyctl.errors import RunError
from skyctl.worker.peer import Peer
from skyctl.worker.rank_order import SumGroupOrder
from skyctl.worker.rounds.round_start import RoundStart
from skyctl.worker.sums.batch_norm_stats import BatchNormStats, batch_norm_stats
from skyctl.worker.sums.route_sum import RouteSum
from skyctl.worker.sums.sum_codecs import chunk_numel
from skyctl.worker.sums.sum_layout import SumLayout, make_layout
from skyctl.worker.sums.sum_messages import DIFFERENCES, WEIGHTS
from skyctl.worker.sums.sum_work import SumWork
from skyctl.worker.sums.summed_gradients import check_summable, find_trained
from skyctl.workload.mixed_precision import MasterWeights

Tensor = torch.Tensor

GOES_ON, ENDS_NEXT, ENDS = range(3)
"""Whether the run ends: not yet, with the next round, with this one. Ranks agree on the largest."""
_EXACT = "float32"


class AverageReport(NamedTuple):
    """One round's average, as one rank saw it.

    Attributes:
        samples: that all replicas' weights together are of; 0: there is no average, and the weights are
            spoilt, so the caller restores them.
        idle_s: waiting for other replicas to end their local steps.
        transfer_s: from then until the average was there.
        end: ``GOES_ON``, ``ENDS_NEXT`` or ``ENDS``, as agreed by all replicas of these layers.
    """

    samples: int
    idle_s: float
    transfer_s: float
    end: int


class WeightAverage:
    """One stage's part in each round's average.

    Attributes:
        groups: how many ranges of its layers are averaged apart, each with replicas of its own.
        needs_start: whether ``average`` needs to know the weights that the round began with.

    Args:
        layers: the stage's, [start, start + len(layers)) of the model.
        groups: those of its layers.
        peers: the connections to every rank on their routes, by rank.
        format: of the weights that are sent, ``sync.format`` of the plan.
        chunk_bytes: the most bytes of weights in a message.

    Raises:
        WorkloadError: a layer's parameters are trained with sparse gradients, or complex.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        start: int,
        groups: Sequence[SumGroupOrder],
        peers: Mapping[int, Peer],
        *,
        format: str = _EXACT,  # noqa: A002 — as the plan calls it
        chunk_bytes: int,
    ) -> None:
        check_summable(layers)
        self.needs_start = format != _EXACT
        trained = find_trained(layers)
        self._travel_s = 2 * max((peer.latency_s for peer in peers.values()), default=0.0)
        self._weights = MasterWeights(p for layer in layers for p in layer.parameters())
        self._groups = []
        for group in groups:
            first, stop = group.start - start, group.stop - start
            sums = RouteSum.from_order(group, peers)
            weights = [p.master for p in trained if first <= p.layer < stop]
            figures = [figure for layer in layers[first:stop] for figure in batch_norm_stats(layer)]
            self._groups.append(_GroupAverage(sums, weights, figures, format, chunk_bytes))

    @property
    def groups(self) -> int:
        """How many groups of replicas this stage is in."""
        return len(self._groups)

    @property
    def ended_by(self) -> int | None:
        """As ``GradientSync.ended_by``."""
        return next((rank for group in self._groups if (rank := group.ended_by) is not None), None)

    def average(
        self, round_number: int, samples: int, end: int, start: RoundStart | None = None
    ) -> AverageReport:
        """Puts the average of all replicas' weights in the place of this one's.

        Args:
            samples: that this rank's weights are of; 0: they count nothing.
            end: as far as this rank knows.
            start: the weights that the round began with, where the average needs them.

        Raises:
            PeerLostError: a replica is gone.
            RunError: a replica has sent something else than what was expected.
        """
        began = time.perf_counter()
        for group in self._groups:
            group.begin(round_number, samples)
        # all ranks in one order, or they would wait for each other
        agreed = max((group.agree(end) for group in reversed(self._groups)), default=end)
        announced = time.perf_counter()
        totals = [group.finish() for group in self._groups]
        if self.needs_start:
            assert start is not None, "the weights that the round began with"
            for group, total in zip(self._groups, totals, strict=True):
                group.begin_differences(round_number, samples, total, start)
            for group in self._groups:
                group.finish_differences(start)
        self._weights.refresh()
        waited_s = announced - began
        travelling_s = min(waited_s, self._travel_s)
        transfer_s = time.perf_counter() - announced + travelling_s
        return AverageReport(
            min(totals, default=samples), waited_s - travelling_s, transfer_s, agreed if self._groups else end
        )

    def reset_residuals(self) -> None:
        """Drops what encodings have lost, as a run that resumes here has none of it."""
        for group in self._groups:
            group.reset_residuals()

    def close(self) -> None:
        """Ends the threads; the connections must be closed before."""
        for group in self._groups:
            group.close()


class _GroupAverage:
    """The average of one range of layers: its weights, its norms' figures, and the number of samples."""

    def __init__(
        self,
        sums: RouteSum,
        weights: Sequence[nn.Parameter],
        figures: Sequence[BatchNormStats],
        format: str,  # noqa: A002
        chunk_bytes: int,
    ) -> None:
        self._sums, self._weights, self._figures, self._format = sums, list(weights), list(figures), format
        shares = [route.share for route in sums.routes]
        sizes = [w.numel() for w in weights]
        counted = [*(figure.numel for figure in figures), 1]
        whole = [*sizes, *counted] if format == _EXACT else counted
        self._layout: SumLayout = make_layout([whole], shares, chunk_numel(_EXACT, chunk_bytes))
        self._rounded = make_layout([sizes], shares, chunk_numel(format, chunk_bytes))
        self._errors: list[Tensor] | None = None
        self._sum_work: SumWork | None = None
        self._values: list[Tensor] = []

    def begin(self, round_number: int, samples: int) -> None:
        self._sum_work = SumWork(self._layout, round_number, kind=WEIGHTS, format=_EXACT)
        self._sums.begin(self._sum_work, 1)
        values = self._flat_weights() if self._format == _EXACT else []
        for value in values:
            _scale(value, samples)
        values += [_scale(figure.weighted(1.0), samples, keep_last=True) for figure in self._figures]
        self._values = [*values, torch.tensor([samples], dtype=torch.float32)]
        self._sum_work.add_bucket(self._values)

    @property
    def ended_by(self) -> int | None:
        return self._sums.ended_by

    def agree(self, end: int) -> int:
        return self._sums.agree(bytes([end]), ENDS)[0]

    def finish(self) -> int:
        """Waits for the sums and divides them; returns the samples that they are of."""
        *values, count = self._summed()
        total = count.item()
        if not (math.isfinite(total) and total >= 0):
            raise RunError(f"the samples that holders say their weights are of add up to {total:g}")
        if total > 0:
            figures = values[len(values) - len(self._figures) :]
            weights = values[: len(values) - len(self._figures)]
            for value in weights:
                value.div_(total)
            self._set_weights(weights)
            for figure, value in zip(self._figures, figures, strict=True):
                value[:-1].div_(total)
                figure.set(value)
        return round(total)

    def begin_differences(self, round_number: int, samples: int, total: int, start: RoundStart) -> None:
        """Begins the sum of what rounds have changed, each by its part of the samples; none of no samples."""
        if not total:
            return
        values = self._flat_weights()
        for value, weight in zip(values, self._weights, strict=True):
            _scale(value.sub_(start.of(weight).reshape(-1)), samples)
            value.div_(float(total))
        if self._errors is None:
            self._errors = [torch.zeros_like(value) for value in values]
        elif values:
            torch._foreach_add_(values, self._errors)
        errors = [self._errors]
        self._sum_work = SumWork(
            self._rounded, round_number, kind=DIFFERENCES, format=self._format, errors=errors
        )
        self._sums.begin(self._sum_work)
        self._values = values
        self._sum_work.add_bucket(values)

    def finish_differences(self, start: RoundStart) -> None:
        """Waits for the sum that was begun, and adds it to what the weights were."""
        if not self._values:
            return
        values = self._summed()
        for value, weight in zip(values, self._weights, strict=True):
            value.add_(start.of(weight).reshape(-1))
        self._set_weights(values)

    def reset_residuals(self) -> None:
        self._errors = None

    def close(self) -> None:
        self._sums.close()

    def _flat_weights(self) -> list[Tensor]:
        return [weight.detach().reshape(-1) for weight in self._weights]  # in place where contiguous

    def _set_weights(self, values: Sequence[Tensor]) -> None:
        """Takes the flat values of those weights that they are no view of."""
        for weight, value in zip(self._weights, values, strict=bool(values)):
            if not weight.is_contiguous():
                weight.detach().copy_(value.view(weight.shape))

    def _summed(self) -> list[Tensor]:
        """Waits for the sum that was begun; what it has made of this replica's values."""
        assert self._sum_work is not None
        self._sum_work.wait()
        values, self._values = self._values, []
        return values


def _scale(value: Tensor, samples: int, *, keep_last: bool = False) -> Tensor:
    """The value times the samples, in its place; zeros for none, whatever it held."""
    part = value[:-1] if keep_last else value
    if samples:
        part.mul_(float(samples))
    else:
        value.zero_()
    return value
