"""The device a rank runs on, its peak memory there, and what it finds on its node.

A rank sends what it finds before it builds anything; the launcher compares it with what the plan was made
for.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import Any

import torch

from skyctl.device import accelerator, host, node_environment
from skyctl.device.cgroup import read_limits
from skyctl.device.process_memory import peak_resident_bytes
from skyctl.errors import MismatchError, SkyctlError
from skyctl.worker.rank_events import EnvironmentEvent


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most this process has held so far: resident memory on a CPU, its tensors on an accelerator.

    Memory shared with other forks of one process counts in part (``device.process_memory``). None: this kind
    of accelerator does not count it.
    """
    return peak_resident_bytes() if device.type == "cpu" else accelerator.peak_bytes(device)


def use_device(name: str) -> torch.device:
    """``cpu:0`` or ``cuda:1`` as torch's device, made the current one.

    Raises:
        MismatchError: torch can't use that device here.
    """
    device = torch.device("cpu" if name.startswith("cpu") else name)
    if device.type != "cpu":
        try:
            torch.empty(1, device=device)
            torch.accelerator.set_device_index(device.index or 0)
        except Exception as exc:
            raise MismatchError(
                f"device {name} of the plan can't be used here: {type(exc).__name__}: {exc}",
                hint="see 'skyctl check'; 'devices:' in cluster.yaml says which devices of a node to use",
            ) from exc
    return device


def find_environment(device: str) -> EnvironmentEvent:
    """The environment of a rank for that device (``cpu:0``, ``cuda:1``), told before it builds anything."""
    quota, cpus = read_limits().quota, float(host.usable_cpus())
    environment: dict[str, Any] = {
        "device_name": None,
        "memory_bytes": None,
        "memory_scope": None,
        "own_bytes": 0.0,
    }
    with suppress(SkyctlError, RuntimeError, AssertionError):  # torch's, of a device that it can't reach
        name, memory = (
            node_environment.list_devices([device])[0]["name"],
            node_environment.device_memory(device),
        )
        environment |= {key: memory[key] for key in ("memory_bytes", "memory_scope", "own_bytes")}
        environment["device_name"] = name
    return EnvironmentEvent(
        devices=tuple(entry["id"] for entry in node_environment.list_devices(None)),
        cpu_model=node_environment.cpu_model(),
        cpus=min(cpus, quota.cpus) if quota is not None else cpus,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        **environment,
    )
