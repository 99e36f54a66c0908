"""The device a rank runs on, and what it has held there."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from skyctl.device.sharing import others
from skyctl.errors import MismatchError


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most this process has held so far: resident memory on a CPU, allocated memory on CUDA.

    What it shares with others that were forked from the same process counts in part (``device.sharing``).
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type != "cpu":
        return None
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return max(0, int(line.split()[1]) * 1024 - others().all_bytes)
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def use_device(name: str) -> torch.device:
    """``cpu:0`` or ``cuda:1`` as torch's device, made the current one."""
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
