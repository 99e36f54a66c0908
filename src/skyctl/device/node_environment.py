"""A node's environment: versions, processors, memory, devices. Task: ``skyctl.device.node_environment``.

A figure that can't be had is None, and ``notes`` says why.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from skyctl.agent.message_fields import with_index
from skyctl.agent.process_tree import read_boot_id
from skyctl.device.accelerator import (
    empty_cache,
    free_and_total_bytes,
    has_own_memory,
    list_accelerators,
    reserved_bytes,
)
from skyctl.device.cgroup import Limits, read_limits
from skyctl.device.host import cpu_affinity, memory_bytes, usable_cpus
from skyctl.device.process_memory import private_bytes, resident_bytes
from skyctl.errors import SkyctlError


def main(payload: dict[str, Any], channel: Any) -> dict[str, Any]:  # noqa: ARG001 - the task interface
    """The task: ``{"devices": ["cpu", "cuda:1"] | null}`` → ``collect_environment``'s dict."""
    return collect_environment(payload.get("devices"))


def collect_environment(wanted: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything known of this node without measuring.

    Args:
        wanted: device names (``cpu``, ``cuda:0``), or None for all accelerators, else the CPU.

    Returns:
        ``hostname, platform, python, torch, cpu_model, cpus, cpu_scope, bound, affinity, quota,
        memory_total_bytes, memory_available_bytes, boot_id, threads, devices, notes, numa_nodes``.
        ``cpu_scope`` is equal on nodes that draw from the same processors: under one quota where that binds
        (``bound``), else with the same ``affinity``, the numbers of those we may use (None: not told);
        ``numa_nodes``: groups of processors, each with memory of its own, that hold one we may use.

    Raises:
        SkyctlError: a wanted device is not there.
    """
    limits = read_limits()
    memory = host_memory(limits)
    boot = boot_id()
    quota = limits.quota
    cpus = float(usable_cpus())
    bound = quota is not None and quota.cpus < cpus
    allowed = cpu_affinity()
    scope = f"cpus {','.join(map(str, allowed))}" if allowed else ""
    if quota is not None and bound:
        scope = quota.scope
    quota_fields = None
    if quota is not None:
        quota_fields = {"cpus": quota.cpus, "period_s": quota.period_s, "burst_s": quota.burst_s}
    return {
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cpu_model": cpu_model(),
        "cpus": quota.cpus if quota is not None and bound else cpus,
        "cpu_scope": f"{boot}/{scope}",
        "bound": bound,
        "affinity": allowed,
        "quota": quota_fields,
        "numa_nodes": numa_nodes(),
        "memory_total_bytes": memory["total_bytes"],
        "memory_available_bytes": memory["available_bytes"],
        "boot_id": boot,
        "threads": torch.get_num_threads(),
        "devices": list_devices(wanted),
        "notes": [limits.unseen] if limits.unseen else [],
    }


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> int | None:
    """How many of the machine's NUMA nodes hold a processor that we may use; None where it is not told."""
    allowed = set(cpu_affinity() or ())
    try:
        numbers = _parse_cpu_list((folder / "online").read_text())
        return (
            sum(1 for n in numbers if allowed & _parse_cpu_list((folder / f"node{n}/cpulist").read_text()))
            or None
        )
    except (OSError, ValueError):
        return None


def _parse_cpu_list(text: str) -> set[int]:
    """``0-3,8`` → {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "cpu model", "hardware") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def host_memory(limits: Limits) -> dict[str, Any]:
    """Total and available bytes, the smaller of the machine's and the cgroup's.

    Available is what a run would find: this process's own private pages are counted as free, because they
    will be gone by then.
    """
    total, free = memory_bytes()
    own = private_bytes()
    free = min(total, free + own)
    cgroup = limits.memory
    if cgroup is None or cgroup.limit_bytes >= total:
        return {"total_bytes": total, "available_bytes": free, "from": "free memory", "scope": None}
    left = min(cgroup.limit_bytes, cgroup.left_bytes + own)
    if left <= free:
        return {
            "total_bytes": cgroup.limit_bytes,
            "available_bytes": left,
            "from": "cgroup limit",
            "scope": cgroup.scope,
        }
    return {"total_bytes": cgroup.limit_bytes, "available_bytes": free, "from": "free memory", "scope": None}


def list_devices(wanted: Sequence[str] | None) -> list[dict[str, Any]]:
    """The devices to use, as ``{"id": "cuda:0", "name": …}``; the CPU only where no accelerator is."""
    there = list_accelerators()
    if wanted is None:
        return there or [_cpu_device()]
    by_id = {device["id"]: device for device in [*there, _cpu_device()]}
    chosen = []
    for name in wanted:
        local = with_index(name)
        if local not in by_id:
            raise SkyctlError(
                f"device {name!r} is not there; this node has {', '.join(by_id)}",
                hint=f"correct `devices` in cluster.yaml, or install a torch that sees {name!r}",
            )
        chosen.append(by_id[local])
    return chosen


def _cpu_device() -> dict[str, Any]:
    return {"id": "cpu:0", "name": cpu_model()}


def device_memory(device: str) -> dict[str, Any]:
    """The memory that a stage on that device can use, and how much is taken before the first layer.

    Returns:
        ``memory_bytes, memory_from, memory_scope, reserved_bytes, own_bytes``. On the CPU ``reserved_bytes``
        is this process's resident size: torch imported, the workload read, layers run. On a card with memory
        of its own it is the context with its libraries. ``memory_scope``: the pot that others draw from too.
        ``own_bytes``: how much of that pot this process holds.
    """
    if has_own_memory(torch.device(device)):
        return _own_memory(torch.device(device))
    memory = host_memory(read_limits())
    return {
        "memory_bytes": memory["available_bytes"],
        "memory_from": memory["from"],
        "memory_scope": f"{boot_id()}/{memory['scope'] or ''}",
        "reserved_bytes": resident_bytes(),
        "own_bytes": private_bytes(),
    }


def boot_id() -> str:
    """A text that is the same for all processes of one running kernel: nodes with equal ones share a machine.

    Of a system without boot ids, its host name.
    """
    return read_boot_id() or socket.gethostname()


def _own_memory(device: torch.device) -> dict[str, Any]:
    """Free memory of a card with its own, with this process's part counted as free, then as reserved."""
    empty_cache(device)
    free, total = free_and_total_bytes(device)
    context = _context_bytes(device, free)
    return {
        "memory_bytes": min(total, free + reserved_bytes(device) + context),
        "reserved_bytes": context,
        "memory_from": "free memory",
        "memory_scope": None,
        "own_bytes": 0,
    }


_FREE_BEFORE_BYTES: dict[torch.device, int] = {}
"""By device: free bytes before this process made its context (see ``note_free_memory``)."""


def note_free_memory(device: str) -> None:
    """Call before the first use of a device: remembers what is free then, to tell the context's size.

    Asking makes a bare context itself, so what is noted is nearly the state after it; the figure from the
    driver (nvidia-smi's, through NVML) is not among what a node must have.
    """
    if has_own_memory(torch.device(device)):
        _FREE_BEFORE_BYTES[torch.device(device)] = free_and_total_bytes(torch.device(device))[0]


CONTEXT_BYTES = 512 << 20
"""A CUDA context with cuBLAS and cuDNN loaded takes 300 to 500 MB; the driver hides the part made at once."""


def _context_bytes(device: torch.device, free: int) -> int:
    grown = _FREE_BEFORE_BYTES.get(device, free) - free - reserved_bytes(device)
    return max(CONTEXT_BYTES, grown)
