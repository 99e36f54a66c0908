"""Averages of weights by samples: the same bytes for all replicas, whatever their layers are made of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.helpers.rounding import rounding
from tests.worker.sums import connected, places, ring, star, together
from torch import nn

from skyctl.errors import RunError
from skyctl.worker.rank_order import SumGroupOrder
from skyctl.worker.rounds.round_start import RoundStart
from skyctl.worker.rounds.weight_average import ENDS, ENDS_NEXT, GOES_ON, WeightAverage
from skyctl.worker.sums.batch_norm_stats import batch_norm_stats
from skyctl.workload.mixed_precision import master_of, to_low_precision

COUNT = 3
LAYERS = 4
CLOSE = rounding(COUNT)


def make_layers(rank: int) -> list[nn.Module]:
    """Layers of one rank: some in bfloat16 over masters, one whose weight is not contiguous, one frozen."""
    torch.manual_seed(rank)
    low, odd, frozen, plain = nn.Linear(5, 3), nn.Linear(4, 6), nn.Linear(2, 2), nn.Linear(7, 2)
    for name, parameter in list(low.named_parameters()):
        lowered = to_low_precision(parameter, parameter.detach().clone(), torch.bfloat16)
        low._parameters[name] = lowered
    odd.weight = nn.Parameter(torch.randn(4, 6).t())
    frozen.requires_grad_(False)
    return [low, odd, frozen, plain]


def averaged(routes: Any, samples: list[int], ends: list[int]) -> tuple[list[list[nn.Module]], list[Any]]:
    """Every rank's layers after an average, and what each was told."""
    layers = [make_layers(rank) for rank in range(COUNT)]
    with connected(routes, COUNT) as peers:

        def act(rank: int) -> Any:
            group = SumGroupOrder(0, 0, tuple(places(routes, rank)), start=0, stop=LAYERS)
            average = WeightAverage(layers[rank], 0, [group], peers[rank], chunk_bytes=64)
            averages.append(average)
            return average.average(7, samples[rank], ends[rank])

        averages: list[WeightAverage] = []
        reports = together(COUNT, act)
    for average in averages:
        average.close()
    for report in reports:
        if isinstance(report, Exception):
            raise report
    return layers, reports


@pytest.mark.parametrize("routes", [ring(COUNT), star(COUNT, 1)], ids=["ring", "star"])
@pytest.mark.parametrize("samples", [[5, 0, 3], [1, 1, 1], [0, 0, 900_000]])
def test_weights_are_the_mean_by_samples(routes: Any, samples: list[int]) -> None:
    layers, reports = averaged(routes, samples, [GOES_ON] * COUNT)
    before = [make_layers(rank) for rank in range(COUNT)]
    assert [report.samples for report in reports] == [sum(samples)] * COUNT
    assert {report.end for report in reports} == {GOES_ON}
    for place in range(LAYERS):
        for name, parameter in layers[0][place].named_parameters():
            own = [dict(row[place].named_parameters())[name] for row in before]
            weights = [dict(row[place].named_parameters())[name] for row in layers]
            if not parameter.requires_grad:
                assert all(torch.equal(a, b) for a, b in zip(own, weights, strict=True))
                continue
            mean = sum(n * master_of(w).detach() for n, w in zip(samples, own, strict=True)) / sum(samples)
            assert isinstance(mean, torch.Tensor)
            for weight in weights:
                torch.testing.assert_close(master_of(weight).detach(), mean, rtol=CLOSE, atol=CLOSE)
                assert torch.equal(master_of(weight), master_of(weights[0])), "to the last bit"
                assert torch.equal(
                    weight.detach().float(), master_of(weight).detach().to(weight.dtype).float()
                )


@pytest.mark.parametrize(("sync_format", "rounding"), [("bfloat16", 2.0**-8), ("int8", 1 / 254)])
@pytest.mark.parametrize("routes", [ring(COUNT), star(COUNT, 1)], ids=["ring", "star"])
def test_what_rounding_loses_comes_with_later_rounds(sync_format: str, rounding: float, routes: Any) -> None:
    """However many rounds there are, the mean is off by no more than a few roundings of one round."""
    rounds, size = 40, 300
    torch.manual_seed(0)
    changes = torch.rand(COUNT, size) * 1e-3 + 0.1
    changes[:, 0] = 1.0  # the largest of its block
    samples = [[1, 2, 0], [3, 1, 2]]
    start = torch.randn(size)
    weights = [nn.Linear(size, 1, bias=False) for _ in range(COUNT)]
    averages: list[WeightAverage] = []
    with connected(routes, COUNT) as peers:

        def act(rank: int) -> None:
            group = SumGroupOrder(0, 0, tuple(places(routes, rank)), start=0, stop=1)
            layers = [weights[rank]]
            average = WeightAverage(layers, 0, [group], peers[rank], format=sync_format, chunk_bytes=300)
            averages.append(average)
            begun = RoundStart(layers)
            with torch.no_grad():
                weights[rank].weight[0] = start
            for number in range(rounds):
                begun.take()
                with torch.no_grad():
                    weights[rank].weight[0] += changes[rank]
                average.average(number, samples[number % 2][rank], GOES_ON, begun)

        for outcome in together(COUNT, act):
            assert not isinstance(outcome, Exception), outcome
    for average in averages:
        average.close()
    exact = start.double()
    for number in range(rounds):
        counts = samples[number % 2]
        exact += sum(n * change.double() for n, change in zip(counts, changes, strict=True)) / sum(counts)
    off = (weights[0].weight[0].detach() - exact).abs().max().item()
    assert 0 < off < 4 * rounding, "without feedback it would be off by tens of roundings"
    assert all(torch.equal(layer.weight, weights[0].weight) for layer in weights)


def test_who_knows_of_the_end_tells_all_and_nobodys_samples_are_told() -> None:
    _, reports = averaged(ring(COUNT), [2, 2, 2], [GOES_ON, ENDS_NEXT, GOES_ON])
    assert {report.end for report in reports} == {ENDS_NEXT}
    _, reports = averaged(star(COUNT), [0, 0, 0], [ENDS_NEXT, ENDS, GOES_ON])
    assert {report.end for report in reports} == {ENDS}
    assert {report.samples for report in reports} == {0}


def test_a_weight_that_is_no_number_counts_nothing_where_it_is_not_to() -> None:
    layers = [nn.Linear(2, 2) for _ in range(2)]
    with torch.no_grad():
        layers[1].weight.fill_(torch.nan)
    expected = layers[0].weight.detach().clone()
    routes = star(2)
    averages: list[WeightAverage] = []
    with connected(routes, 2) as peers:

        def act(rank: int) -> Any:
            group = SumGroupOrder(0, 0, tuple(places(routes, rank)), start=0, stop=1)
            average = WeightAverage([layers[rank]], 0, [group], peers[rank], chunk_bytes=64)
            averages.append(average)
            return average.average(0, 4 if rank == 0 else 0, GOES_ON)

        together(2, act)
    for average in averages:
        average.close()
    assert all(torch.equal(layer.weight, expected) for layer in layers)


@pytest.mark.parametrize("samples", [[math.nan, 2, 3], [-9, 2, 3], [1e39, 2, 3]])
def test_numbers_of_samples_that_can_not_be_are_an_error_for_all(samples: list[Any]) -> None:
    with pytest.raises(RunError, match="samples that holders say their weights are of add up to"):
        averaged(star(COUNT, 1), samples, [GOES_ON] * COUNT)


@pytest.mark.parametrize("sync_format", ["float32", "int8"])
def test_more_samples_than_an_integer_of_64_bits_holds_are_a_number_like_others(sync_format: str) -> None:
    layers = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    averages: list[WeightAverage] = []
    routes = star(2)
    with connected(routes, 2) as peers:

        def act(rank: int) -> Any:
            group = SumGroupOrder(0, 0, tuple(places(routes, rank)), start=0, stop=1)
            own = [layers[rank]]
            average = WeightAverage(own, 0, [group], peers[rank], format=sync_format, chunk_bytes=64)
            averages.append(average)
            with torch.no_grad():
                layers[rank].weight.fill_(1.0)
            start = RoundStart(own)
            start.take()
            with torch.no_grad():
                layers[rank].weight.fill_(1.0 + rank)
            return average.average(0, 10**30 if rank else 1, GOES_ON, start)

        outcomes = together(2, act)
    for average in averages:
        average.close()
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)], outcomes
    for layer in layers:
        torch.testing.assert_close(layer.weight.detach(), torch.full((2, 2), 2.0))


def test_a_number_of_batches_that_can_not_be_is_an_error() -> None:
    (figures,) = batch_norm_stats(nn.BatchNorm1d(2))
    with pytest.raises(RunError, match="batches that holders say a norm has seen add up to nan"):
        figures.set(torch.full((5,), math.nan))
