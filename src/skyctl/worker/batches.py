"""The batches of a stage that needs them: the next one prefetched, and a batch split into microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from skyctl.errors import RunError, WorkloadError


class Prefetcher:
    """Hands out batches in order, and fetches the next one while the stage would only wait.

    Prefetching is right only if a batch stays as it was when the next is made. Some data sources fill the
    same buffers again; the first two batches show it, and then nothing is prefetched.
    """

    def __init__(self, batches: Iterator[tuple[Any, Any]]) -> None:
        self._batches = batches
        self._handed_out = 0
        self._current: tuple[Any, Any] | None = None
        self._prefetched: tuple[Any, Any] | None = None
        self._separate_buffers = False

    def get(self) -> tuple[Any, Any]:
        """The next batch, as (inputs, targets).

        Raises:
            WorkloadError: there is none left.
        """
        batch, self._prefetched = self._prefetched or self._fetch(), None
        if self._handed_out == 1:
            self._separate_buffers = not (_storage_pointers(self._current) & _storage_pointers(batch))
        self._handed_out += 1
        self._current = batch
        return batch

    def prefetch(self) -> None:
        """Fetches the next batch now, where that is safe."""
        if self._separate_buffers and self._prefetched is None:
            self._prefetched = self._fetch()

    def _fetch(self) -> tuple[Any, Any]:
        for batch in self._batches:
            inputs, targets = batch
            return inputs, targets
        raise WorkloadError(f"the data ended after {self._handed_out} batches")


def _storage_pointers(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, (tuple, list)):
        return set().union(*(_storage_pointers(item) for item in value)) if value else set()
    return set()


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    """One tensor as a tuple of one; a tuple or list of tensors as a tuple."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def split_batch(value: Any, sizes: Sequence[int], device: torch.device) -> list[Any]:
    """A batch (a tensor, or a tuple of them) split along its first dimension, on the stage's device.

    Each part has a version counter of its own: a layer that overwrites one part does not make autograd think
    that it has changed another, which is kept for a backward.

    Raises:
        RunError: the batch is not made of tensors with ``sum(sizes)`` samples each.
    """
    if isinstance(value, (tuple, list)):
        parts = [split_batch(item, sizes, device) for item in value]
        return [tuple(part[m] for part in parts) for m in range(len(sizes))]
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != sum(sizes):
        is_tensor = isinstance(value, torch.Tensor)
        found = f"a tensor of shape {list(value.shape)}" if is_tensor else type(value).__name__
        raise RunError(
            f"the data gave {found} where a batch of {sum(sizes)} samples is needed",
            hint="data(batch_size, seed) must give full batches of tensors, samples in the first dimension",
        )
    return [part.data for part in torch.split(value.to(device), list(sizes))]
