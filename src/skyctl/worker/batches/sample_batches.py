"""The batches of a stage that needs them: the next one prefetched, and a batch split into microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from skyctl.errors import RunError, WorkloadError
from skyctl.workload.data import Batch
from skyctl.workload.structures import Value, flatten_value, unflatten_value, value_tensors


class Prefetcher:
    """Hands out batches in order, and fetches the next one while the stage would only wait.

    Prefetching is right only if a batch stays as it was when the next is made. Some data sources fill the
    same buffers again; the first two batches show it, and then nothing is prefetched.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._handed_out = 0
        self._current: Batch | None = None
        self._prefetched: Batch | None = None
        self._separate_buffers = False

    def get(self) -> Batch:
        """The next batch, as (inputs, targets).

        Raises:
            WorkloadError: there is none left.
        """
        batch, self._prefetched = self._prefetched or self._fetch(), None
        if self._handed_out == 1 and self._current is not None:
            self._separate_buffers = not (_storage_pointers(self._current) & _storage_pointers(batch))
        self._handed_out += 1
        self._current = batch
        return batch

    def prefetch(self) -> None:
        """Fetches the next batch now, where that is safe."""
        if self._separate_buffers and self._prefetched is None:
            self._prefetched = self._fetch()

    def _fetch(self) -> Batch:
        for batch in self._batches:
            inputs, targets = batch
            return inputs, targets
        raise WorkloadError(f"the data ended after {self._handed_out} batches")


def _storage_pointers(batch: Batch) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in value_tensors(batch)}


def split_inputs(value: Value, sizes: Sequence[int], device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """A batch's inputs by microbatch, as the tensors that a stage is called with, on its device.

    Each part has a version counter of its own: a layer that overwrites one part does not make autograd think
    that it has changed another, which is kept for a backward.

    Args:
        sizes: samples of each microbatch.

    Raises:
        RunError: a tensor has not ``sum(sizes)`` samples.
    """
    tensors = value_tensors(value)
    for tensor in tensors:
        if not tensor.dim() or tensor.shape[0] != sum(sizes):
            raise RunError(
                f"the data gave a tensor of shape {list(tensor.shape)} where a batch of {sum(sizes)} samples "
                "is needed",
                hint="data(batch_size, seed) must give full batches, samples in the first dimension",
            )
    parts = [tensor.to(device).split_with_sizes(list(sizes)) for tensor in tensors]
    return [tuple([part.data for part in microbatch]) for microbatch in zip(*parts, strict=True)]


def split_targets(value: Value, sizes: Sequence[int], device: torch.device) -> list[Value]:
    """A batch's targets by microbatch, in the structure that the loss takes; else as ``split_inputs``."""
    structure = flatten_value(value)[1]
    return [unflatten_value(tensors, structure) for tensors in split_inputs(value, sizes, device)]
