"""Both ends' sketches of a batch: the same for the same samples, another for any other order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from skyctl.run.batch_check import _agree
from skyctl.worker.batches.batch_sketch import EVERY_STEPS, FIRST_STEPS, BatchSketcher, sketch_value
from skyctl.worker.rank_events import BatchSketch
from skyctl.workload.data import Batch, EpochPosition, UserData

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


def same(value: Tensors, other: Tensors, key: str = "step") -> bool:
    return _agree(sketch_value(value, 3, key), sketch_value(other, 3, key))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(16,), (16, 3), (16, 3, 20, 20)])
def test_another_order_of_the_samples_differs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    value = (torch.randn(shape, generator=generator) * 40 + 100).to(dtype)
    shuffled = value[torch.randperm(16, generator=generator)]
    assert same(value, value.clone())
    assert same(value.transpose(0, -1), value.transpose(0, -1).contiguous())
    assert not same(value, shuffled)
    assert not same((value, value), (value, shuffled))
    swapped = value[torch.tensor([1, 0, *range(2, 16)])]
    assert value.dim() == 1 or not same(value, swapped)
    assert sketch_value(value, 3, "a") != sketch_value(value, 3, "b")


def test_last_bits_make_no_difference_whole_numbers_do() -> None:
    for seed in range(500):
        value = torch.randn(32, 50, generator=torch.Generator().manual_seed(seed))
        assert same(value, value * (1 + 1e-5))
        assert same(value, value.bfloat16())
    pixels = torch.full((32, 50), 0.1)  # all are rounded the same way
    assert same(pixels, pixels.bfloat16())
    assert not same(torch.arange(32), torch.arange(32) + (torch.arange(32) == 7))
    assert not same(torch.tensor([True, False]), torch.tensor([False, True]))


def test_what_can_not_be_looked_at_is_taken_as_the_same() -> None:
    assert same(torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse())
    assert same(
        torch.tensor([float("nan"), 1.0, float("inf")]), torch.tensor([float("nan"), 1.0, float("inf")])
    )
    assert same(torch.zeros(0), torch.zeros(0))
    assert not same(torch.tensor([1 + 2j]), torch.tensor([2 + 1j]))


def sketches(data: UserData, steps: int, first_step: int = 0, *, values: bool = True) -> list[BatchSketch]:
    position = data.position = EpochPosition()
    batches: Iterator[Batch] = data.batches(first_step, 0, data.batch_size)
    sketcher = BatchSketcher(batches, position, seed=3, first_step=first_step, values=values)
    taken = []
    for step in range(first_step, first_step + steps):
        next(sketcher)
        sketch = sketcher.take(step)
        assert sketch is not None
        assert sketcher.take(step) is None
        taken.append(sketch)
    return taken


def user_data(*, seeded: bool = True, bad: int | None = None) -> UserData:
    def data(batch_size: int, seed: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed if seeded else 0)
        batches = [
            (torch.randn(batch_size, 2, generator=generator), torch.arange(batch_size)) for _ in range(3)
        ]
        if bad is not None:
            batches[bad][0][1, 1] = float("nan")
        return batches

    return UserData(data, "data()", 4, 0)


def test_each_sketch_says_where_its_batch_comes_from() -> None:
    taken = sketches(user_data(), 5, first_step=2)
    assert [(sketch.epoch, sketch.index, sketch.length) for sketch in taken] == [
        (0, 2, 3), (1, 0, 3), (1, 1, 3), (1, 2, 3), (2, 0, 3),
    ]  # fmt: skip


def test_of_batches_that_were_left_out_nothing_is_kept() -> None:
    """Of rounds of four batches the first ends after one; its others are fetched in the second."""
    data, position = user_data(), EpochPosition()
    batches: Iterator[Batch] = data.batches(0, 0, data.batch_size)
    sketcher = BatchSketcher(batches, position, seed=3, first_step=0, values=True)
    next(sketcher)
    assert sketcher.take_some(0, 4) is not None
    for _ in range(5):
        next(sketcher)
    assert sketcher.take_some(4, 4) is not None
    assert [step for step in range(8) if sketcher.take(step) is not None] == []


def test_the_first_steps_are_sketched_and_then_some() -> None:
    taken = sketches(user_data(), FIRST_STEPS + 2 * EVERY_STEPS)
    shown = [step for step, sketch in enumerate(taken) if sketch.inputs]
    assert shown == [*range(FIRST_STEPS), EVERY_STEPS, 2 * EVERY_STEPS]
    assert not any(sketch.inputs or sketch.targets for sketch in sketches(user_data(), 3, values=False))


def test_values_that_are_no_numbers_are_told_at_each_step() -> None:
    taken = sketches(user_data(bad=1), 3, values=False)
    assert [sketch.finite_inputs for sketch in taken] == [True, False, True]
    assert all(sketch.finite_targets for sketch in taken)


def test_an_epoch_that_repeats_the_first_is_told_once() -> None:
    assert [sketch.repeats for sketch in sketches(user_data(seeded=False), 8)].count(True) == 1
    assert not any(sketch.repeats for sketch in sketches(user_data(), 8))
