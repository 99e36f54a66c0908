"""The facts that a node and a rank find of an accelerator: devices, names, memory, time, random numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skyctl.check import check_task
from skyctl.device import accelerator, node_environment
from skyctl.device.device_timer import DeviceTimer
from skyctl.errors import MismatchError, SkyctlError
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.worker.rank_environment import find_environment, peak_memory_bytes, use_device

TOY = torch.device("toy:1")
FOUND = [{"id": "toy:0", "name": "toy accelerator 0"}, {"id": "toy:1", "name": "toy accelerator 1"}]


def test_all_devices_are_found_by_name() -> None:
    assert node_environment.list_devices(None) == FOUND
    assert [device["id"] for device in node_environment.list_devices(["cpu", "toy:1"])] == ["cpu:0", "toy:1"]
    assert accelerator.device_uuid(TOY) == "toy-1"
    with pytest.raises(SkyctlError, match=r"'cuda:0' is not there; this node has toy:0, toy:1, cpu:0"):
        node_environment.list_devices(["cuda:0"])


def test_memory_is_the_devices_own() -> None:
    node_environment.note_free_memory("toy:1")
    held = torch.zeros(10 << 20, dtype=torch.uint8, device=TOY)
    told = node_environment.device_memory("toy:1")
    assert (told["memory_bytes"], told["memory_scope"], told["own_bytes"]) == (2 << 30, None, 0)
    assert told["reserved_bytes"] == node_environment.CONTEXT_BYTES
    environment = find_environment("toy:1")
    assert (environment.device_name, environment.memory_bytes) == ("toy accelerator 1", 2 << 30)
    del held


def test_a_peak_is_the_devices_tensors() -> None:
    torch.accelerator.reset_peak_memory_stats(TOY)
    before = peak_memory_bytes(TOY)
    assert before is not None
    torch.zeros(1 << 20, device=TOY)
    assert peak_memory_bytes(TOY) == before + (4 << 20)
    assert peak_memory_bytes(torch.device("toy:0")) != peak_memory_bytes(torch.device("cpu"))


def test_check_tries_each_device(tmp_path: Path) -> None:
    told = check_task._torch_environment(None, tmp_path)
    assert [(one["id"], one["memory_bytes"]) for one in told["devices"]] == [
        ("toy:0", 2 << 30),
        ("toy:1", 2 << 30),
        ("cpu:0", None),
    ]
    assert (told["missing"], told["faults"]) == ([], {})


def test_a_rank_makes_its_device_the_current_one() -> None:
    assert use_device("toy:1") == TOY
    assert torch.accelerator.current_device_index() == 1
    with pytest.raises(MismatchError, match=r"device toy:2 of the plan can't be used here"):
        use_device("toy:2")
    use_device("toy:0")


FORK = """
import os, sys, torch
from skyctl.agent.forkserver import _is_accelerator_lost
if sys.argv[1] == "used":
    torch.empty(1, device="toy")
assert not _is_accelerator_lost()
if not os.fork():
    os._exit(_is_accelerator_lost())
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("before", ["used", "unused"])
def test_a_fork_knows_that_it_has_lost_the_accelerator(before: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, before], check=False)
    assert done.returncode == (before == "used")


def test_work_is_waited_for() -> None:
    host, values = torch.zeros(4).pin_memory(), torch.ones(4, device=TOY)
    timer = DeviceTimer(1.0, single_thread=True, device=TOY)
    done = timer.run(lambda: host.copy_(values, non_blocking=True))
    assert host.tolist() == [1.0] * 4
    assert done.cpu_s == 0.0


def test_a_layer_draws_the_same_in_whichever_stage_it_is() -> None:
    use_device("toy:1")
    whole, part = LayerSeeder(7, 0, TOY), LayerSeeder(7, 3, TOY)
    whole(2, 4)
    drawn = torch.rand(5, device=TOY)
    torch.rand(17, device=TOY)
    part(2, 1)
    assert torch.equal(torch.rand(5, device=TOY), drawn)
    part(2, 2)
    assert not torch.equal(torch.rand(5, device=TOY), drawn)
    use_device("toy:0")
