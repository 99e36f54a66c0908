"""Seconds that do not depend on what else the machine does: limits, and the processor's pace."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

PACE_EVERY_S = 1.0


@contextmanager
def processor_clock() -> Iterator[None]:
    """Time limits count a processor's seconds, those of ``time.perf_counter`` in this process."""
    wall_clock = time.perf_counter
    time.perf_counter = time.process_time
    try:
        yield
    finally:
        time.perf_counter = wall_clock


class Pace:
    """How fast this processor is while a section runs: fixed work of the planner's kind, now and then.

    Other work on the machine changes that by half within minutes.
    """

    def __init__(self) -> None:
        self._samples_s: list[float] = []
        self._next = 0.0

    def tick(self) -> None:
        """Measures, unless it was done a moment ago."""
        if time.perf_counter() < self._next:
            return
        began = time.process_time()
        table = {(i, i % 7): i * 0.5 for i in range(15_000)}
        total = sum(value for key, value in sorted(table.items()) if key[1])
        matrix = np.full((40, 40), total)
        for _ in range(1_000):
            matrix = np.minimum(matrix, matrix.T + 1.0)
        self._samples_s.append(time.process_time() - began)
        self._next = time.perf_counter() + PACE_EVERY_S

    @property
    def mean_s(self) -> float:
        """Seconds of a processor for the fixed work."""
        return statistics.fmean(self._samples_s)
