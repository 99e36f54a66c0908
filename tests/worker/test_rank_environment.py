"""The facts that a rank tells before it builds anything."""

from __future__ import annotations

import pytest
import torch

from skyctl.device import process_memory
from skyctl.worker.rank_environment import find_environment, peak_memory_bytes


def test_of_a_device_that_is_not_there_no_memory_is_told() -> None:
    environment = find_environment("cpu:1")
    assert (environment.device_name, environment.memory_bytes) == (None, None)
    there = find_environment("cpu:0")
    assert there.device_name
    assert (there.memory_bytes or 0) > 0


def test_a_peak_that_does_not_grow_costs_no_walk_over_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    monkeypatch.setattr(
        process_memory, "shared_pages", lambda: walks.append(1) or process_memory.SharedPages(0, 4096)
    )
    process_memory._shared_bytes_at.cache_clear()
    peaks = [peak_memory_bytes(torch.device("cpu")) for _ in range(20)]
    process_memory._shared_bytes_at.cache_clear()
    assert len(walks) <= 2  # the peak may pass a MiB meanwhile
    assert min(peak or 0 for peak in peaks) > 10 << 20
