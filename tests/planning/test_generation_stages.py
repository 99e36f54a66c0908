"""Layers go to the fastest device first, and on to the next once its memory is full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.errors import InfeasibleError
from skyctl.planning.generation_stages import StageLayers, fill_devices


def device(name: str, flops_per_s: float, memory: float, reserved: float = 0.0) -> Any:
    return SimpleNamespace(
        id=f"{name}/cpu:0", flops_per_s=flops_per_s, memory_bytes=memory, reserved_bytes=reserved
    )


def test_one_device_that_holds_the_model_holds_all_of_it() -> None:
    slow, fast = device("slow", 1e9, 1e3), device("fast", 2e9, 1e3)
    assert fill_devices([10.0] * 4, [slow, fast]) == [StageLayers("fast/cpu:0", 0, 4)]


def test_the_next_one_takes_what_is_left() -> None:
    devices = [device("a", 1e9, 1e3), device("b", 3e9, 60.0, 10.0), device("c", 2e9, 5.0)]
    assert fill_devices([10.0] * 6, devices) == [
        StageLayers("b/cpu:0", 0, 4),  # 80% of 50 bytes
        StageLayers("a/cpu:0", 4, 6),
    ]


def test_what_fits_nowhere_is_refused_with_what_there_is() -> None:
    with pytest.raises(InfeasibleError, match="layer 4 fits on none that is left") as caught:
        fill_devices([10.0] * 6, [device("a", 1e9, 50.0)])
    assert "bfloat16" in str(caught.value.hint)
