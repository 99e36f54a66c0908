"""Devices of any kind that ``torch.accelerator`` offers, with a made-up one in its place."""

from types import SimpleNamespace

import pytest
import torch

from skyctl.device import device_timer, node_facts
from skyctl.probe.node.repetition_timer import RepetitionTimer


class Cards:
    """What torch's module of such a kind offers: two cards of 8 GiB."""

    def __init__(self) -> None:
        self.free = 7 << 30

    def mem_get_info(self, _index: int) -> tuple[int, int]:
        return self.free, 8 << 30

    def memory_reserved(self, _index: int) -> int:
        return 1 << 30

    def empty_cache(self) -> None:
        pass

    def get_device_name(self, index: int) -> str:
        return f"card {index}"

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"u{index}")


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Cards:
    cards = Cards()
    offered = SimpleNamespace(
        is_available=lambda: True,
        current_accelerator=lambda: torch.device("xpu"),
        device_count=lambda: 2,
        synchronize=lambda _device: None,
    )
    monkeypatch.setattr(torch, "accelerator", offered)
    monkeypatch.setattr(torch, "xpu", cards)
    return cards


@pytest.mark.usefixtures("xpu")
def test_all_are_found_by_name() -> None:
    assert node_facts.list_devices(None) == [
        {"id": "xpu:0", "name": "card 0"},
        {"id": "xpu:1", "name": "card 1"},
    ]
    assert [device["id"] for device in node_facts.list_devices(["cpu", "xpu:1"])] == ["cpu:0", "xpu:1"]
    assert node_facts.gpu_uuid("xpu:1") == "u1"


def test_memory_of_its_own(xpu: Cards) -> None:
    node_facts.note_free_memory("xpu:0")
    xpu.free -= 3 << 30
    found = node_facts.device_memory("xpu:0")
    assert found["reserved_bytes"] == 2 << 30, "what it grew by, but for what torch holds"
    assert found["memory_bytes"] == 7 << 30
    assert found["memory_scope"] is None


def test_memory_that_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mps", SimpleNamespace())
    node_facts.note_free_memory("mps:0")
    found = node_facts.device_memory("mps:0")
    assert found["memory_scope"] is not None
    assert found["reserved_bytes"] > 0
    assert node_facts.gpu_uuid("mps:0") is None


def test_work_is_waited_for_and_has_no_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(device_timer.torch, "accelerator", SimpleNamespace(synchronize=waited.append))
    timer = RepetitionTimer("xpu:1")
    wall_s, cpu_s = timer.run(lambda: None)
    assert waited == [torch.device("xpu:1")]
    assert wall_s > 0
    assert cpu_s == 0
    assert timer.wall_cpu_ratio() is None
