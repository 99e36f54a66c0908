"""Counters of a node's load while a device is measured: who uses its processors, and what holds it back.

Only counts are read here. Who the others are is told by the launcher, which knows what the probe's own
processes on the same machine used (``probe/background_load.py``). A count that can't be had is None.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from skyctl.device.cgroup import read_limits

PROC_STAT = Path("/proc/stat")
THERMAL_FOLDER = Path("/sys/devices/system/cpu")
SMI_TIMEOUT_S = 20.0


SCHEDSTAT = Path("/proc/thread-self/schedstat")

SLICE_S = 0.2

SLICE_PERIODS = 10
"""A slice is at least so long: a period more or less in it must not matter."""

QUIET_SHARE = 0.05
"""A slice counts where the thread waited for other things than a processor for at most this part of it."""

ENOUGH_SHARE = 0.25
"""Where less than this part of the CPU time is in such slices, the calmest ones with so much count."""

MOST_DRAIN_S = 5.0

MATRIX_SIDE = 192


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
        found: dict[str, Any] = {"wall_s": wall_s, "machine_cpus": len(_allowed_cpus()) or None}
        for name, value in after.items():
            before = self._before.get(name)
            found[name] = None if value is None or before is None else max(0, value - before)
        return found


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


def _allowed_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _busy_s(stat: Path | None = None) -> tuple[float, float] | None:
    """(busy, stolen) seconds of the processors that this process may use. Guests' time is in user time."""
    try:
        lines = (stat or PROC_STAT).read_text().splitlines()
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    allowed = {f"cpu{number}" for number in _allowed_cpus()}
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


def _overheat_count() -> int | None:
    """How often the processors that we may use were throttled for their heat; a package counts once."""
    counts: dict[str, int] = {}
    for number in _allowed_cpus():
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
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=index,uuid,utilization.gpu,memory.used"
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit():
            busy, held = _number_or_none(fields[2]), _number_or_none(fields[3])
            found.append(
                {
                    "index": int(fields[0]),
                    "uuid": fields[1].removeprefix("GPU-"),
                    "busy": None if busy is None else busy / 100,
                    "held_bytes": None if held is None else held * 2**20,
                }
            )
    return found


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


@dataclass(frozen=True)
class CpuSlice:
    """A slice of time, for ``blocked_s`` of which the thread neither ran nor waited for a processor."""

    wall_s: float
    cpu_s: float
    blocked_s: float


def thread_schedstat() -> tuple[float, float] | None:
    """(seconds run, seconds waited for a processor) of this thread so far; None where it is not told."""
    try:
        ran, waited = map(int, SCHEDSTAT.read_text().split()[:2])
    except (OSError, ValueError):
        return None
    return (ran / 1e9, waited / 1e9) if ran else None  # a kernel that does not count says 0


@dataclass
class WallCpuRatio:
    """The time slices measured so far. ``period_s``: of the CPU quota, 0 without one."""

    period_s: float = 0.0
    slices: list[CpuSlice] = field(default_factory=list)
    _wall_s: float = 0.0
    _cpu_s: float = 0.0
    _last_read: tuple[float, float] | None = field(default=None)
    """``thread_schedstat`` when the slice under way began."""

    def __post_init__(self) -> None:
        self._last_read = thread_schedstat()

    def add(self, wall_s: float, cpu_s: float) -> None:
        """Adds a repetition and the time before it, which follows the last one without a gap."""
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        if self._wall_s >= max(SLICE_S, SLICE_PERIODS * self.period_s):
            now, before = thread_schedstat(), self._last_read
            blocked_s = 0.0
            if now is not None and before is not None:
                blocked_s = max(0.0, self._wall_s - (now[0] - before[0]) - (now[1] - before[1]))
            self.slices.append(CpuSlice(self._wall_s, self._cpu_s, blocked_s))
            self._wall_s = self._cpu_s = 0.0
            self._last_read = now

    def quiet_slices(self) -> list[CpuSlice]:
        """The slices that count: those in which the thread hardly waited, or the calmest."""
        calm = sorted(self.slices, key=lambda one: one.blocked_s / one.wall_s)
        wanted_s = ENOUGH_SHARE * sum(one.cpu_s for one in calm)
        chosen: list[CpuSlice] = []
        for one in calm:
            if one.blocked_s > QUIET_SHARE * one.wall_s and sum(p.cpu_s for p in chosen) >= wanted_s:
                break
            chosen.append(one)
        return chosen

    def ratio(self) -> float | None:
        """Wall seconds per CPU second over the slices that count; None where there are none yet."""
        kept = self.quiet_slices()
        cpu_s = sum(one.cpu_s for one in kept)
        return sum(one.wall_s for one in kept) / cpu_s if cpu_s > 0 else None

    def interval(self) -> float:
        """Half of the ratio's 95% interval (two standard errors over the slices), relative; 0: not known."""
        values = [one.wall_s / one.cpu_s for one in self.quiet_slices() if one.cpu_s > 0]
        if len(values) < 3:
            return 0.0
        return 2 * statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)

    def left_out_s(self) -> float:
        """Seconds that the thread was blocked in the slices that do not count."""
        blocked_s = sum(one.blocked_s for one in self.slices) - sum(p.blocked_s for p in self.quiet_slices())
        return max(0.0, blocked_s)


def drain_burst(quota: Mapping[str, float] | None) -> None:
    """Uses up the burst that a quota's cgroup has saved, so that it is not taken for speed.

    Keeps the processors busy until the quota throttles, or what may have been saved must be gone.

    Args:
        quota: ``burst_s``, ``cpus``, ``period_s``; None, or no burst: nothing is done.
    """
    burst_s = 0.0 if quota is None else quota.get("burst_s", 0.0)
    if quota is None or burst_s <= 0.0:
        return
    spare = max(0.05, torch.get_num_threads() - quota["cpus"])
    end = time.monotonic() + min(MOST_DRAIN_S, 1.5 * burst_s / spare + 2 * quota["period_s"])
    before = _throttled_s()
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE)
    while time.monotonic() < end:
        torch.mm(matrix, matrix)
        if before is not None and (_throttled_s() or 0.0) > before:
            return


def _throttled_s() -> float | None:
    quota = read_limits().quota
    return None if quota is None else quota.throttled_s
