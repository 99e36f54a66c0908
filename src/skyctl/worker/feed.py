"""Batches for a stage that needs them, the next one fetched while the stage would only wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from skyctl.errors import RunError, WorkloadError


class Feed:
    """Hands out batches in order.

    Fetching ahead is right only if a batch stays as it was when the next is made. Some data sources fill the
    same buffers again; the first two batches show it, and then nothing is fetched ahead.
    """

    def __init__(self, batches: Iterator[tuple[Any, Any]]) -> None:
        self._batches = batches
        self._given = 0
        self._current: tuple[Any, Any] | None = None
        self._ahead: tuple[Any, Any] | None = None
        self._separate = False

    def get(self) -> tuple[Any, Any]:
        """The next batch.

        Raises:
            WorkloadError: there is none left.
        """
        batch, self._ahead = self._ahead or self._fetch(), None
        if self._given == 1:
            self._separate = not (_storages(self._current) & _storages(batch))
        self._given += 1
        self._current = batch
        return batch

    def ahead(self) -> None:
        """Fetches the next batch already now, where that is safe."""
        if self._separate and self._ahead is None:
            self._ahead = self._fetch()

    def _fetch(self) -> tuple[Any, Any]:
        for batch in self._batches:
            inputs, targets = batch
            return inputs, targets
        raise WorkloadError(f"the data ended after {self._given} batches")


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, (tuple, list)):
        return set().union(*(_storages(item) for item in value)) if value else set()
    return set()


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    """One tensor or several as a tuple."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def split(value: Any, sizes: Sequence[int], device: torch.device) -> list[Any]:
    """A batch (a tensor, or a tuple of them) cut along its first dimension, on the stage's device.

    The parts count their changes each for itself: a layer that overwrites one does not make autograd think
    that it has changed another, which it keeps for a backward.
    """
    if isinstance(value, (tuple, list)):
        parts = [split(item, sizes, device) for item in value]
        return [tuple(part[m] for part in parts) for m in range(len(sizes))]
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != sum(sizes):
        found = (
            f"a tensor of shape {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        raise RunError(
            f"the data gave {found} where a batch of {sum(sizes)} samples is needed",
            hint="data(batch_size, seed) must give full batches of tensors, samples in the first dimension",
        )
    return [part.data for part in torch.split(value.to(device), list(sizes))]
