"""The differences between kinds of accelerators; that all is found on one is in ``tests/accelerator``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from skyctl.device import accelerator, node_environment

MPS, XPU = torch.device("mps:0"), torch.device("xpu:1")


def test_without_an_accelerator_the_cpu_is_used() -> None:
    assert accelerator.list_accelerators() == []
    assert [device["id"] for device in node_environment.list_devices(None)] == ["cpu:0"]


def test_memory_that_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mps", SimpleNamespace())
    node_environment.note_free_memory(str(MPS))
    memory = node_environment.device_memory(str(MPS))
    assert memory["memory_scope"] is not None
    assert memory["reserved_bytes"] > 0
    assert accelerator.peak_bytes(MPS) is None
    assert (accelerator.device_name(MPS), accelerator.device_uuid(MPS)) == ("mps", None)


@pytest.mark.parametrize("older", [False, True])
def test_memory_of_its_own(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards of 8 GiB; a torch before 2.9 tells of them in their kind's module."""
    free = [0, 7 << 30]
    names = ("mem_get_info" if older else "get_memory_info", "memory_reserved", "empty_cache")
    tell = (lambda index: (free[index], 8 << 30)), (lambda _index: 1 << 30), (lambda: None)
    module = SimpleNamespace(**dict(zip(names, tell, strict=True)))
    monkeypatch.setattr(torch, "xpu" if older else "accelerator", module)
    monkeypatch.setattr(torch, "accelerator" if older else "xpu", SimpleNamespace())
    node_environment.note_free_memory(str(XPU))
    free[1] -= 3 << 30
    memory = node_environment.device_memory(str(XPU))
    assert memory["reserved_bytes"] == 2 << 30, "what it grew by, but for what torch holds"
    assert memory["memory_bytes"] == 7 << 30
    assert memory["memory_scope"] is None
