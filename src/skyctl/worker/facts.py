"""What a rank finds where it was sent, told before it builds anything, for ``launch`` to compare."""

from __future__ import annotations

import platform
from contextlib import suppress
from typing import Any

import torch

from skyctl.device import facts
from skyctl.device.cgroup import read_limits
from skyctl.errors import SkyctlError


def found(device: str) -> dict[str, Any]:
    """The ``facts`` event of a rank for that device (``cpu:0``, ``cuda:1``).

    ``device_name`` is None where the device is not there or can't be used, and ``devices`` are those that
    are; its memory is then None too. ``memory_scope``: see ``device.facts.device_memory``.
    """
    quota, cpus = read_limits().quota, float(facts.usable_cpus())
    event: dict[str, Any] = {
        "event": "facts",
        "device_name": None,
        "devices": [one["id"] for one in facts.devices(None)],
        "cpu_model": facts.cpu_model(),
        "cpus": min(cpus, quota.cpus) if quota is not None else cpus,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "memory_bytes": None,
        "memory_scope": None,
        "own_bytes": 0,
    }
    with suppress(SkyctlError, RuntimeError, AssertionError):  # torch's, of a device that it can't reach
        name, memory = facts.devices([device])[0]["name"], facts.device_memory(device)
        event |= {key: memory[key] for key in ("memory_bytes", "memory_scope", "own_bytes")}
        event["device_name"] = name
    return event
