"""Wall seconds per CPU second of one thread, read in slices, without those in which it waited for something.

While a layer is built, its code or the user's may be read from a disk: the thread then neither runs nor
waits for a processor. Counted as if it were the quota's doing, that would make all layers of a node too
slow. The kernel tells the three apart in ``/proc/thread-self/schedstat``: running, waiting for a
processor (held back by a quota included), and the rest. Short waits under a quota cost nothing, because what
was not used then may be used later in the same period: only whole slices are left out.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from skyctl.device.cgroup import read_limits

SCHEDSTAT = Path("/proc/thread-self/schedstat")
SLICE_S = 0.2
SLICE_PERIODS = 10
"""A slice is at least so long: a period more or less in it must not matter."""

QUIET_SHARE = 0.05
"""A slice counts where the thread waited for other things than a processor for at most this part of it."""

ENOUGH_SHARE = 0.25
"""If less than this part of the CPU time is in such slices, the calmest ones with so much count."""


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
        calm = sorted(self.slices, key=lambda piece: piece.blocked_s / piece.wall_s)
        wanted_s = ENOUGH_SHARE * sum(piece.cpu_s for piece in calm)
        chosen: list[CpuSlice] = []
        for piece in calm:
            if piece.blocked_s > QUIET_SHARE * piece.wall_s and sum(p.cpu_s for p in chosen) >= wanted_s:
                break
            chosen.append(piece)
        return chosen

    def ratio(self) -> float | None:
        """Wall seconds per CPU second over the slices that count; None where there are none yet."""
        kept = self.quiet_slices()
        cpu_s = sum(piece.cpu_s for piece in kept)
        return sum(piece.wall_s for piece in kept) / cpu_s if cpu_s > 0 else None

    def interval(self) -> float:
        """Half of the ratio's 95% interval (two standard errors over the slices), relative; 0: not known."""
        values = [piece.wall_s / piece.cpu_s for piece in self.quiet_slices() if piece.cpu_s > 0]
        if len(values) < 3:
            return 0.0
        return 2 * statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)

    def left_out_s(self) -> float:
        """Seconds that the thread was blocked in the slices that do not count."""
        blocked_s = sum(piece.blocked_s for piece in self.slices) - sum(
            p.blocked_s for p in self.quiet_slices()
        )
        return max(0.0, blocked_s)


MOST_DRAIN_S = 5.0
MATRIX_SIDE = 192


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
    matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE, dtype=torch.float32)
    while time.monotonic() < end:
        torch.mm(matrix, matrix)
        if before is not None and (_throttled_s() or 0.0) > before:
            return


def _throttled_s() -> float | None:
    quota = read_limits().quota
    return None if quota is None else quota.throttled_s
