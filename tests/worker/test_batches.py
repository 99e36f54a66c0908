"""Batches are prefetched where that is safe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skyctl.errors import WorkloadError
from skyctl.worker.batches.sample_batches import Prefetcher


def test_batches_are_fetched_ahead_unless_the_source_reuses_them() -> None:
    fetched = 0

    def fresh() -> Iterator[tuple[Any, Any]]:
        nonlocal fetched
        for i in range(4):
            fetched += 1
            yield torch.full((2,), i), torch.full((2,), i)

    prefetcher = Prefetcher(fresh())
    prefetcher.get()
    prefetcher.prefetch()
    assert fetched == 1  # not known yet
    prefetcher.get()
    prefetcher.prefetch()
    prefetcher.prefetch()
    assert fetched == 3
    assert prefetcher.get()[0][0] == 2
    prefetcher.get()
    with pytest.raises(WorkloadError, match="the data ended after 4 batches"):
        prefetcher.get()

    def reused() -> Iterator[tuple[Any, Any]]:
        buffer = torch.zeros(2)
        for i in range(4):
            yield buffer.fill_(i), (buffer,)

    prefetcher = Prefetcher(reused())
    prefetcher.get()
    assert prefetcher.get()[0][0] == 1
    prefetcher.prefetch()
    assert prefetcher.get()[0][0] == 2
