"""The cost of adding up gradients on a device."""

import pytest
import torch

from skyctl.probe.node import device_speed
from skyctl.probe.node.device_speed import REDUCE_BYTES, REDUCE_CHUNK_BYTES, measure_reduce_byte_s


def test_a_gradient_is_added_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = torch.Tensor.add_

    def add(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        sizes.append(other.nbytes)
        return real(mine, other)

    monkeypatch.setattr(torch.Tensor, "add_", add)
    assert 0 < measure_reduce_byte_s("cpu", 1.0) < 1e-6
    assert set(sizes) == {REDUCE_CHUNK_BYTES}
    assert sum(sizes) == REDUCE_BYTES * (1 + device_speed.REDUCE_PASSES)


def test_a_quota_stretches_the_processors_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(device_speed.time, "process_time", lambda: float(next(ticks)))
    assert measure_reduce_byte_s("cpu", 10.0) == pytest.approx(10.0 / REDUCE_BYTES)
