"""Counters of a node's load while a device is measured: who uses its processors, and what holds it back.

Only counts are read here. The launcher tells who the others are: it knows what the probe's own
processes on the same machine used (``probe/background_load.py``). A count that can't be had is None.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from skyctl.device.cgroup import read_limits
from skyctl.device.host import cpu_affinity
from skyctl.device.nvidia_smi import run_nvidia_smi
from skyctl.probe.node.wall_cpu_ratio import thread_schedstat

PROC_STAT = Path("/proc/stat")
PROC_CPUINFO = Path("/proc/cpuinfo")
THERMAL_FOLDER = Path("/sys/devices/system/cpu")


class LoadCounters:
    """Counts from when it is made until ``read``."""

    def __init__(self) -> None:
        self._before = _read_counters()
        self._start = time.monotonic()

    def read(self) -> dict[str, Any]:
        """Differences since the start.

        Returns:
            ``wall_s``; CPU seconds ``own_s`` (this process), ``scope_s`` (all under this process's quota),
            ``machine_s`` (all on the processors that it may use), ``steal_s`` (of these, taken by the host);
            ``waited_s``, ``ran_s`` (this thread: for a processor, on one); ``overheated`` (how often a
            processor was throttled for its heat); ``machine_cpus``.
        """
        after, wall_s = _read_counters(), time.monotonic() - self._start
        differences: dict[str, Any] = {"wall_s": wall_s, "machine_cpus": len(cpu_affinity() or ()) or None}
        for name, value in after.items():
            before = self._before.get(name)
            differences[name] = None if value is None or before is None else max(0, value - before)
        return differences


def _read_counters() -> dict[str, float | None]:
    quota = read_limits().quota
    busy = _busy_s()
    thread = thread_schedstat()
    return {
        "own_s": time.process_time(),
        "scope_s": None if quota is None else quota.used_s,
        "machine_s": None if busy is None else busy[0],
        "steal_s": None if busy is None else busy[1],
        "ran_s": None if thread is None else thread[0],
        "waited_s": None if thread is None else thread[1],
        "overheated": _overheat_count(),
    }


def _busy_s(stat: Path | None = None) -> tuple[float, float] | None:
    """(busy, stolen) seconds of the processors that this process may use. Guests' time is in user time."""
    try:
        lines = (stat or PROC_STAT).read_text().splitlines()
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    allowed = {f"cpu{number}" for number in (cpu_affinity() or ())}
    busy = stolen = 0
    seen = False
    for line in lines:
        name, *fields = line.split()
        if name in allowed and len(fields) >= 7:
            seen = True
            user, nice, system, _idle, _iowait, irq, softirq, *rest = map(int, fields)
            busy += user + nice + system + irq + softirq
            stolen += rest[0] if rest else 0
    return (busy / tick, stolen / tick) if seen else None


class HaltWatch:
    """How much of the time the processors of a virtual machine halt, from when it is made.

    A host gives a core that halts to other guests, and what runs on it next finds their values in the caches.
    """

    def __init__(self, stat: Path = PROC_STAT, cpuinfo: Path = PROC_CPUINFO) -> None:
        self._stat, self._cpuinfo = stat, cpuinfo
        self._before_s, self._start = self._halted_s(), time.monotonic()

    def share(self) -> float | None:
        """The part of its processors' time; None: this is no virtual machine, or nothing tells."""
        after_s, wall_s = self._halted_s(), time.monotonic() - self._start
        if self._before_s is None or after_s is None or wall_s <= 0:
            return None
        return min(1.0, max(0.0, after_s - self._before_s) / (wall_s * max(1, len(cpu_affinity() or ()))))

    def _halted_s(self) -> float | None:
        try:
            if "hypervisor" not in self._cpuinfo.read_text().split():
                return None
            lines = [line.split() for line in self._stat.read_text().splitlines()]
            allowed = {f"cpu{number}" for number in (cpu_affinity() or ())}
            ticks = [int(line[4]) + int(line[5]) for line in lines if line and line[0] in allowed]
            return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
        except (OSError, ValueError, IndexError):
            return None


def _overheat_count() -> int | None:
    """How often the processors that we may use were throttled for their heat; a package counts once."""
    counts: dict[str, int] = {}
    for number in cpu_affinity() or ():
        folder = THERMAL_FOLDER / f"cpu{number}" / "thermal_throttle"
        for kind in ("core", "package"):
            try:
                count = int((folder / f"{kind}_throttle_count").read_text())
            except (OSError, ValueError):
                continue
            package = folder.parent / "topology" / "physical_package_id"
            name = f"package {package.read_text() if package.is_file() else 0}"
            key = name if kind == "package" else f"core {number}"
            counts[key] = max(counts.get(key, 0), count)
    return sum(counts.values()) if counts else None


def gpu_usage() -> list[dict[str, Any]]:
    """Every NVIDIA gpu as it is now, to be called before this process uses one; [] where nothing tells.

    Returns:
        ``{"index", "uuid", "busy" (0 to 1), "held_bytes"}`` each, as ``nvidia-smi`` gives them.
    """
    query = "--query-gpu=index,uuid,utilization.gpu,memory.used"
    gpus = []
    for line in run_nvidia_smi(query, "--format=csv,noheader,nounits"):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit():
            busy, held = _number_or_none(fields[2]), _number_or_none(fields[3])
            gpus.append(
                {
                    "index": int(fields[0]),
                    "uuid": fields[1].removeprefix("GPU-"),
                    "busy": None if busy is None else busy / 100,
                    "held_bytes": None if held is None else held * 2**20,
                }
            )
    return gpus


def _number_or_none(text: str) -> float | None:
    """A gpu may not tell (``[N/A]``)."""
    try:
        return float(text)
    except ValueError:
        return None


def find_gpu(gpus: list[dict[str, Any]], index: int, uuid: str | None) -> dict[str, Any] | None:
    """The one that torch calls by that index: gpus are numbered otherwise there, so by its uuid if known."""
    by_uuid = [gpu for gpu in gpus if uuid and gpu["uuid"] == uuid.removeprefix("GPU-")]
    if uuid and any(gpu["uuid"] for gpu in gpus):
        return by_uuid[0] if by_uuid else None
    return next((gpu for gpu in gpus if gpu["index"] == index), None)
