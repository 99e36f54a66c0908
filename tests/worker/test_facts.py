"""What a rank tells before it builds anything."""

from __future__ import annotations

from skyctl.worker.facts import found


def test_of_a_device_that_is_not_there_no_memory_is_told() -> None:
    told = found("cpu:1")
    assert (told["device_name"], told["memory_bytes"]) == (None, None)
    there = found("cpu:0")
    assert there["device_name"]
    assert there["memory_bytes"] > 0
