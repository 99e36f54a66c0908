"""Uses up what a quota's cgroup has saved, so that it is not taken for speed."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from skyctl.device.cgroup import read_limits

MOST_S = 5.0
SIDE = 192


def drain(quota: Mapping[str, float] | None) -> None:
    """Keeps the processors busy until the quota holds us back, or what may be saved must be gone.

    Args:
        quota: ``burst_s``, ``cpus``, ``period_s``; None, or no burst: nothing is done.
    """
    burst_s = 0.0 if quota is None else quota.get("burst_s", 0.0)
    if quota is None or burst_s <= 0.0:
        return
    spare = max(0.05, torch.get_num_threads() - quota["cpus"])
    end = time.monotonic() + min(MOST_S, 1.5 * burst_s / spare + 2 * quota["period_s"])
    before = _held_back_s()
    matrix = torch.ones(SIDE, SIDE)
    while time.monotonic() < end:
        torch.mm(matrix, matrix)
        if before is not None and (_held_back_s() or 0.0) > before:
            return


def _held_back_s() -> float | None:
    quota = read_limits().quota
    return None if quota is None else quota.throttled_s
