"""Batches for a stage that needs them, the next one fetched while the stage would only wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from skyctl.errors import WorkloadError


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
