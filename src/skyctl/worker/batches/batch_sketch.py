"""A few numbers of each batch, by which the launcher sees whether both ends of the pipeline have the same.

``data()`` runs at both ends: inputs are taken at one, targets at the other. Each end sketches the whole of
its batch: whole numbers exactly, floats so that another processor's last bits make no difference. The numbers
are keyed by the run's seed and the step, so other places of large tensors are looked at each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.worker.rank_events import BatchSketch, TensorSketch
from skyctl.workload.data import Batch, EpochPosition, slice_samples
from skyctl.workload.deferred_init import derived_seed
from skyctl.workload.mixed_precision import master_of
from skyctl.workload.structures import Value, value_tensors

FIRST_STEPS = 8
EVERY_STEPS = 16
"""The first steps of an attempt are sketched, then one in so many: a difference in order shows in each."""
SAMPLED_ELEMENTS = 4096
"""Of a larger tensor, so many elements are looked at."""
SUMS = 4
_LARGEST = 1e100
_MOST_COUNTED = 10**8 - 1


class BatchSketcher:
    """Hands a stage's batches on, and keeps a sketch of each until ``take`` asks for it.

    Args:
        position: where in data()'s epochs the batch last given comes from, where its source says.
        values: whether contents are sketched, too, and not only places and lengths; None: nothing is.
        cut: the samples to hand on of each batch, [start, stop); None: all of them.
        is_part: what comes from the source are some of a batch's samples already.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        position: EpochPosition,
        *,
        seed: int,
        first_step: int,
        values: bool | None,
        cut: tuple[int, int] | None = None,
        is_part: bool = False,
    ) -> None:
        self._cut, self._is_part = cut, is_part
        self._batches, self._position, self._seed, self._values = batches, position, seed, values
        self._first_step, self._next_step = first_step, first_step
        self._sketches: dict[int, BatchSketch] = {}
        self._first_of_epoch: tuple[TensorSketch, ...] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        step = self._next_step
        self._next_step += 1
        if self._values is not None:
            self._sketches[step] = self._sketch(step, batch)
        if self._cut is None:
            return batch
        inputs, targets = batch
        return slice_samples(inputs, *self._cut), slice_samples(targets, *self._cut)

    def take(self, step: int) -> BatchSketch | None:
        """The sketch of that step's batch, once; None where this stage has no batches."""
        return self._sketches.pop(step, None)

    def take_some(self, first: int, count: int) -> BatchSketch | None:
        """That of the first of so many batches, as ``take``; those of the others are dropped.

        So are older ones, of batches that were left out and fetched later.
        """
        sketch = self.take(first)
        for step in [step for step in self._sketches if step < first + count]:
            del self._sketches[step]
        return sketch

    def _sketch(self, step: int, batch: Batch) -> BatchSketch:
        inputs, targets = batch
        place = self._position
        has_place = place.index >= 0
        in_full = step - self._first_step < FIRST_STEPS or step % EVERY_STEPS == 0
        shown = bool(self._values) and in_full
        key = f"batch {step}"
        return BatchSketch(
            epoch=min(place.epoch, _MOST_COUNTED) if has_place else None,
            index=min(place.index, _MOST_COUNTED) if has_place else None,
            length=place.length if place.length is not None and 0 <= place.length <= _MOST_COUNTED else None,
            finite_inputs=_is_finite(inputs),
            finite_targets=_is_finite(targets),
            repeats=has_place and place.index == 0 and self._repeats(batch),
            is_part=self._is_part,
            inputs=sketch_value(inputs, self._seed, key) if shown else (),
            targets=sketch_value(targets, self._seed, key) if shown else (),
        )

    def _repeats(self, batch: Batch) -> bool:
        """Whether the second epoch begins with the batch that the first one began with."""
        first, epoch = self._first_of_epoch, self._position.epoch
        if epoch > 1 or (epoch == 1 and first is None):
            return False
        self._first_of_epoch = sketch_value(batch[0], self._seed, "epoch")
        return epoch == 1 and self._first_of_epoch == first


def sketch_batch(batch: Batch, seed: int, key: str) -> BatchSketch:
    """The sketch of one batch's contents, whatever its place."""
    inputs, targets = batch
    return BatchSketch(inputs=sketch_value(inputs, seed, key), targets=sketch_value(targets, seed, key))


@torch.no_grad()
def sketch_layers(layers: Sequence[nn.Module], start: int, seed: int) -> dict[int, tuple[TensorSketch, ...]]:
    """By layer, counted from ``start``, the sketch of each of its parameters (in float32 where it has a
    master), for pipelines that hold the same layers to be compared."""
    return {
        number: tuple(
            _sketch_tensor(master_of(parameter).detach(), derived_seed(seed, f"layer {number} {place}"))
            for place, parameter in enumerate(layer.parameters())
        )
        for number, layer in enumerate(layers, start)
    }


@torch.no_grad()
def sketch_value(value: Value, seed: int, key: str) -> tuple[TensorSketch, ...]:
    """The sketch of each tensor of a value; the same key looks at the same elements."""
    return tuple(
        _sketch_tensor(tensor, derived_seed(seed, f"{key} {place}"))
        for place, tensor in enumerate(value_tensors(value))
    )


def _sketch_tensor(tensor: Tensor, seed: int) -> TensorSketch:
    if not _can_be_sketched(tensor):
        return TensorSketch()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    generator = torch.Generator().manual_seed(seed)
    if tensor.numel() > SAMPLED_ELEMENTS:
        places = torch.randint(tensor.numel(), (SAMPLED_ELEMENTS,), generator=generator)
        elements = torch.take(tensor, places.to(tensor.device)).cpu()
    else:
        elements = tensor.reshape(-1).cpu()
    if not elements.is_floating_point():
        weights = torch.randint(-(2**62), 2**62, (len(elements),), generator=generator)
        return TensorSketch(whole=int((elements.to(torch.int64) * weights).sum()))
    numbers = torch.nan_to_num(elements.double()).clamp(-_LARGEST, _LARGEST)
    signs = torch.randint(0, 2, (SUMS, len(numbers)), generator=generator).double() * 2 - 1
    return TensorSketch(norm=float(numbers.norm()), sums=tuple((signs @ numbers).tolist()))


def _can_be_sketched(tensor: Tensor) -> bool:
    """Not sparse ones, and no floats of 8 bits: torch has few operations for them."""
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.layout is torch.strided and not narrow


@torch.no_grad()
def _is_finite(value: Any) -> bool:
    """Whether all floats are finite. One sum finds that; where it overflows, each element is looked at."""
    return all(
        math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())
        for tensor in value_tensors(value)
        if tensor.is_floating_point() and _can_be_sketched(tensor)
    )
