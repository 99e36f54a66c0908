"""Gradients summed as products of thin matrices: as one process computes them, and alike on every rank."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers.rounding import rounding
from tests.worker.sums import RouteEdges, connected, places, ring, star, together
from tests.worker.test_gradient_sync import packed_trees
from tests.worker.test_resume import keeping, resuming
from torch import nn

from skyctl.schedule.seeds import splitmix64
from skyctl.worker.rank_events import SumSizes
from skyctl.worker.rank_order import SumGroupOrder, SumOrder
from skyctl.worker.sum_helper import SumHelper
from skyctl.worker.sums.fixed_order import multiply, orthonormal
from skyctl.worker.sums.gradient_sync import GradientSync
from skyctl.worker.sums.low_rank_gradients import first_factor

Tensor = torch.Tensor
Workloads = Callable[..., dict[str, Any]]
SEED, START = 7, 3
SHAPES: list[list[tuple[int, ...]]] = [[(40, 30), (40,)], [(6, 5)], [(16, 3, 3, 3), (), (2, 90)]]
"""By layer, of its parameters; with rank 4, three are summed as they are: they are small, or vectors."""
HELPED: list[RouteEdges] = [
    (0.75, 3, [(0, 3), (1, 3), (2, 3)], [(3, 0), (3, 1), (3, 2)]),
    (0.25, 0, [(2, 3), (3, 1), (1, 0)], [(0, 3), (3, 1), (3, 2)]),
]
"""Rank 3 holds nothing."""


class Reference:
    """The algorithm in one process and in float64: given all ranks' gradients, what all of them end with."""

    def __init__(self, rank: int, ranks: int, shapes: Sequence[Sequence[tuple[int, ...]]] = SHAPES) -> None:
        self.rank, self.ranks, self.shapes = rank, ranks, shapes
        self.reset_residuals()

    def reset_residuals(self) -> None:
        self.errors: dict[tuple[int, int], list[Tensor | float]] = {}
        self.q: dict[tuple[int, int], Tensor] = {}

    def step(self, given: Sequence[Sequence[Sequence[Tensor]]]) -> list[list[Tensor]]:
        """``given``: by rank, layer, parameter."""
        return [
            [
                self._sum((i, k), shape, [rank_gradients[i][k].double() for rank_gradients in given])
                for k, shape in enumerate(layer)
            ]
            for i, layer in enumerate(self.shapes)
        ]

    def _sum(self, place: tuple[int, int], shape: tuple[int, ...], given: list[Tensor]) -> Tensor:
        if len(shape) < 2:
            return torch.stack(given).sum(0)
        n, m = shape[0], math.prod(shape[1:])
        if self.rank * (n + m) >= n * m:
            return torch.stack(given).sum(0)
        seed = splitmix64(SEED, START + place[0], place[1])
        errors = self.errors.get(place, [0.0] * self.ranks)
        whole = [g.reshape(n, m) + e for g, e in zip(given, errors, strict=True)]
        q = self.q.get(place, first_factor(m, self.rank, seed).double())
        p, _ = torch.linalg.qr(torch.stack([w @ q for w in whole]).sum(0))
        mine = [w.T @ p for w in whole]
        self.errors[place] = [w - p @ part.T for w, part in zip(whole, mine, strict=True)]
        self.q[place] = torch.stack(mine).sum(0)
        return (p @ self.q[place].T).reshape(shape)


def make_gradients(steps: int, ranks: int, seed: int = 0) -> list[list[list[list[Tensor]]]]:
    """By step, rank, layer and parameter: what all steps have in common, and noise."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator)

    common = [[[draw(shape) for shape in layer] for layer in SHAPES] for _ in range(ranks)]
    return [
        [[[tensor + draw(tuple(tensor.shape)) for tensor in layer] for layer in mine] for mine in common]
        for _ in range(steps)
    ]


def sum_steps(
    routes: Sequence[RouteEdges],
    given: Sequence[Sequence[Any]],
    *,
    rank: int = 4,
    uncompressed: int = 0,
    chunk_bytes: int = 512,
    helps: int | None = None,
    after: Callable[[int, GradientSync], None] = lambda _step, _sync: None,
) -> list[Any]:
    """By rank, by step, layer and parameter what it ends with; of the one that helps, what it was told."""
    ranks = len(given[0])
    count = ranks + (helps is not None)
    sizes: list[SumSizes] = []
    ended = threading.Event()

    with connected(routes, count) as ends:

        def group(number: int) -> SumGroupOrder:
            own_places, stop = places(routes, number), START + len(SHAPES)
            return SumGroupOrder(0, 0, tuple(own_places), start=START, stop=stop, agreement=own_places[0])

        def hold(number: int) -> list[list[list[Tensor | None]]]:
            layers = [nn.ParameterList([torch.zeros(shape) for shape in layer]) for layer in SHAPES]
            sync = GradientSync(
                layers, START, [group(number)], ends[number],
                format=f"powersgd:{rank}", chunk_bytes=chunk_bytes, share=1 / ranks,
                uncompressed_steps=uncompressed, seed=SEED,
            )  # fmt: skip
            if number == 0:
                sizes.append(sync.sizes)
                ended.set()
            out = []
            try:
                for step, all_given in enumerate(given):
                    sync.start_step()
                    for layer, tensors in zip(layers, all_given[number], strict=True):
                        for parameter, tensor in zip(layer, tensors, strict=True):
                            parameter.grad = None if tensor is None else tensor.clone()
                    sync.begin(step)
                    assert not sync.finish(is_last=step + 1 == len(given)).repeats
                    out.append([[p.grad for p in layer] for layer in layers])
                    after(step, sync)
            finally:
                sync.close()
            return out

        def help_to_sum(number: int) -> list[bool]:
            assert ended.wait(20.0)
            sync = SumOrder(
                f"powersgd:{rank}", chunk_bytes, (group(number),), uncompressed_steps=uncompressed
            )
            helper = SumHelper(sync, sizes[0], ends[number])
            endings = [helper.sum_gradients(step) for step in range(len(given))]
            helper.close()
            return endings

        outcomes = together(count, lambda number: help_to_sum(number) if number == helps else hold(number))
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def check_same(rank_sums: Sequence[Sequence[Sequence[Sequence[Tensor]]]]) -> None:
    """All ranks end every step with the same bytes."""
    for other in rank_sums[1:]:
        for mine, theirs in zip(rank_sums[0], other, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_close(sums: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> None:
    """Each parameter's sum is what is expected but for rounding, relative to its norm, at least 1.

    A number is a sum over a column, a row or the ranks; what a step leaves out comes to the next one's.
    """
    for mine, theirs in zip(sums, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            off = (a.double() - b).norm() / max(1.0, b.norm().item())
            assert off < rounding(max(a.shape, default=1)), (tuple(a.shape), off.item())


@pytest.mark.parametrize(
    ("routes", "helps"),
    [(ring(3), None), (star(3, root=1), None), (packed_trees(), None), (HELPED, 3)],
    ids=["ring", "star", "trees", "a helper"],
)
@pytest.mark.parametrize("chunk_bytes", [64, 512, 1 << 20])
def test_sums_are_those_of_one_process(
    routes: Sequence[RouteEdges], helps: int | None, chunk_bytes: int
) -> None:
    """Eight steps, the first two whole, on one bucket and on many."""
    given = make_gradients(8, 3)
    by_rank = sum_steps(routes, given, uncompressed=2, chunk_bytes=chunk_bytes, helps=helps)
    if helps is not None:
        assert by_rank.pop(helps) == [False] * 7 + [True]
    check_same(by_rank)
    reference = Reference(4, 3)
    for step, sums in enumerate(by_rank[0]):
        if step < 2:
            whole = [
                [
                    torch.stack([x.double() for x in all_ranks]).sum(0)
                    for all_ranks in zip(*layer, strict=True)
                ]
                for layer in zip(*given[step], strict=True)
            ]
            check_close(sums, whole)
        else:
            check_close(sums, reference.step(given[step]))


def test_what_is_left_out_is_sent_later() -> None:
    """The same gradients thirty times: the mean of the sums comes to the gradient, though each has rank 1."""
    given = make_gradients(1, 2)
    by_rank = sum_steps(star(2), given * 30, rank=1)
    exact = given[0][0][0][0] + given[0][1][0][0]
    errors = [
        ((torch.stack([sums[0][0] for sums in by_rank[0][:n]]).mean(0) - exact).norm() / exact.norm()).item()
        for n in (1, 10, 30)
    ]
    assert errors[0] > 0.5
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.6, errors


def test_residuals_are_dropped_together() -> None:
    """As where a checkpoint is written: the steps after it are those of a run that begins there."""
    given = make_gradients(5, 2)
    by_rank = sum_steps(
        star(2), given, after=lambda step, sync: sync.reset_residuals() if step == 1 else None
    )
    fresh = sum_steps(star(2), given[2:])
    for mine, theirs in zip(by_rank[0][2:], fresh[0], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_none_zero_and_not_finite() -> None:
    """NaN or infinity on one rank is NaN on all, and gone a step later; None only where it is so for all."""
    given: list[Any] = make_gradients(5, 2)
    given[1][0][0][0][3, 4] = torch.nan
    given[1][1][2][0][0, 0, 0, 0] = torch.inf
    given[2][0][0][0] = None
    given[3][0][0][0] = given[3][1][0][0] = None
    given[4][0][0][0] = given[4][1][0][0] = torch.zeros(40, 30)
    by_rank = sum_steps(ring(2), given)
    first = by_rank[0]
    assert bool(first[1][0][0].isnan().all() and first[1][2][0].isnan().all())
    for rank_sums in by_rank:
        assert rank_sums[3][0][0] is None
        assert all(bool(t.isfinite().all()) for step in (0, 2, 4) for layer in rank_sums[step] for t in layer)
    check_same([[step for n, step in enumerate(rank_sums) if n not in (1, 3)] for rank_sums in by_rank])
    reference = Reference(4, 2)
    given[2][0][0][0] = torch.zeros(40, 30)
    check_close([first[2][0][:1]], [reference.step(given[2])[0][:1]])
    assert float(first[4][0][0].norm()) > 0.0, "the residual of the steps before"


def test_zeros_do_not_end_what_follows() -> None:
    """After a step of zeros, Q would be zero for ever."""
    given: list[Any] = make_gradients(3, 2)
    for rank in range(2):
        given[0][rank][0][0].zero_()
    by_rank = sum_steps(star(2), given)
    assert float(by_rank[0][0][0][0].norm()) == 0.0
    assert float(by_rank[0][1][0][0].norm()) > 1.0


def test_the_same_bits_whatever_the_threads() -> None:
    """The results that all ranks compute alike; against float64, and with dependent columns."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(3000, 8, generator=generator), torch.randn(700, 8, generator=generator)
    p[:, 3] = 2 * p[:, 1] - p[:, 0]
    p[:, 5] = 0.0
    threads, seen = torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            basis, out = orthonormal(p), torch.empty(3000, 700)
            multiply(basis, q, out)
            seen.append((basis, out))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    basis, out = seen[0]
    torch.testing.assert_close(basis.T @ basis, torch.eye(8), rtol=0, atol=rounding(3000))
    held = p.double() - basis.double() @ (basis.double().T @ p.double())
    assert held.norm() / p.norm() < rounding(3000), "it spans the columns"
    torch.testing.assert_close(out.double(), basis.double() @ q.double().T, rtol=0, atol=rounding(8))


LAYERS = 7


def test_ranks_train_alike_and_resume_to_the_last_bit(
    workload: Workloads, pool: Any, driver: ModuleType, tmp_path: Path
) -> None:
    """Three real processes; the run that goes on from the third step's checkpoint equals the one that did."""
    spec, shares = workload(batch_size=8), [1, 3, 2]
    sync = {"format": "powersgd:1", "uncompressed_steps": 1}
    whole = pool.run(driver.side_by_side(spec, LAYERS, shares, star(3), 8))
    orders = driver.side_by_side(
        spec, LAYERS, shares, star(3), 8, sync=sync, checkpoint=keeping(tmp_path), weights=True
    )
    done = pool.run(orders)
    assert not done.errors, done.errors
    assert done.losses[:2] == whole.losses[:2]
    assert done.losses != whole.losses
    assert done.losses == pytest.approx(whole.losses, rel=0.1)
    sketches = [done.checkpoints[rank][-1]["sketches"] for rank in range(3)]
    assert sketches[0] == sketches[1] == sketches[2]
    resume, kept = resuming(done, tmp_path, step=3), keeping(tmp_path / "rest")
    rest = pool.run(
        driver.side_by_side(spec, LAYERS, shares, star(3), 8, sync=sync, resume=resume, checkpoint=kept)
    )
    assert not rest.errors, rest.errors
    assert rest.losses == done.losses[3:]
