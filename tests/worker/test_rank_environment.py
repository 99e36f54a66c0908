"""What a rank tells before it builds anything."""

from __future__ import annotations

from skyctl.worker.rank_environment import find_environment


def test_of_a_device_that_is_not_there_no_memory_is_told() -> None:
    told = find_environment("cpu:1")
    assert (told.device_name, told.memory_bytes) == (None, None)
    there = find_environment("cpu:0")
    assert there.device_name
    assert (there.memory_bytes or 0) > 0
