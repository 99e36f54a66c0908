"""Is the machine itself as fast now as it was a moment ago? On a shared host it may not be.

A virtual machine's neighbours take caches and memory from it: the same work then takes a third more CPU time
for some seconds, and a prediction made before is off by as much, whoever made it. What is read here does not
depend on what is measured, so repeating a case by it does not choose among results.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROUNDS = 100
STEADY = 0.08
"""A case is good where the machine's readings lie this near to each other."""

ATTEMPTS = 3


class Readings:
    """Of one case: taken before, between and after what is measured, with nothing else running."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
        self._input = torch.randn(256, 512, requires_grad=True)
        self._elsewhere = torch.ones(8 << 20)

    def take(self) -> None:
        """About three seconds."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._seconds.append(statistics.fmean(self._once() for _ in range(ROUNDS)))
        finally:
            torch.set_num_threads(threads)

    def _once(self) -> float:
        start = time.thread_time()
        self._mlp(self._input).sum().backward()
        self._elsewhere.sum()
        return time.thread_time() - start

    @property
    def spread(self) -> float:
        """(slowest − fastest) ÷ fastest."""
        return max(self._seconds) / min(self._seconds) - 1

    @property
    def steady(self) -> bool:
        """Whether they agree."""
        return self.spread <= STEADY


def steadily(case: Callable[[Readings], dict[str, Any]]) -> dict[str, Any]:
    """Runs a case again while the machine was not the same throughout, and says how it was in the end."""
    for attempt in itertools.count(1):
        readings = Readings()
        found = case(readings)
        if readings.steady or attempt == ATTEMPTS:
            return found | {"machine_spread": round(readings.spread, 3), "attempts": attempt}
    raise AssertionError("counts for ever")
