"""Is the machine itself as fast while a plan runs as it was while its devices were probed?

On a shared host it may not be: a virtual machine's neighbours take caches and memory from it, the same work
then takes a fifth more CPU time for seconds or minutes, and a prediction made before is off by as much,
whoever made it. So a small piece of work is timed some five times a second all the while, outside of the lab.
It does not depend on what is measured: repeating a case by it does not choose among results, and what a
prediction would have been at the run's speed (``error_at_its_speed``) is told beside what it was.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn

from runs.awake import Awake

PAUSE_S = 0.15
TRIM = 10
"""A tenth of the readings at each end does not count."""

STEADY = 0.05
"""A case is good where the machine's speed differs by this much at most."""

ATTEMPTS = 2
OUTCOMES = ("error", "error_at_its_speed", "prediction_error", "of_bound", "utilisation", "machine_changed")
"""The figures that are told of an attempt that does not count."""


class Watch(threading.Thread):
    """Reads the machine's speed while it is entered: CPU seconds of some milliseconds' work, core by core."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._readings: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        self._input = torch.randn(128, 256, requires_grad=True)

    def __enter__(self) -> Watch:
        torch.set_num_threads(1)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Until it is left."""
        cores = cycle(sorted(os.sched_getaffinity(0)))
        while not self._over.wait(PAUSE_S):
            os.sched_setaffinity(0, {next(cores)})  # of this thread alone
            start = time.thread_time()
            self._mlp(self._input).sum().backward()
            self._readings.append((time.monotonic(), time.thread_time() - start))

    def mean_s(self, start_s: float, end_s: float) -> float:
        """Over that part of the time (``time.monotonic``)."""
        chosen = sorted(seconds for at, seconds in self._readings if start_s <= at <= end_s)
        least = len(chosen) // TRIM
        kept = chosen[least : len(chosen) - least]
        return sum(kept) / len(kept)


@dataclass(frozen=True)
class Case:
    """The findings of a case; when its layers were measured and its steps ran (``time.monotonic``)."""

    figures: dict[str, Any]
    probed: tuple[float, float]
    ran: tuple[float, float]


def steadily(case: Callable[[], Case], attempts: int = ATTEMPTS) -> dict[str, Any]:
    """Runs a case again while the machine was not the same for probe and run, so many times at most.

    Its cores are kept from halting all the while. Gives the attempt in which it changed least, with
    ``machine_changed`` (the watch's CPU seconds in the run ÷ those in the probe − 1), and what the others
    found.
    """
    found: list[dict[str, Any]] = []
    with Awake(), Watch() as watch:
        while len(found) < attempts:
            done = case()
            changed = watch.mean_s(*done.ran) / watch.mean_s(*done.probed) - 1
            figures = done.figures | {"machine_changed": round(changed, 4)}
            if "error" in figures:
                figures["error_at_its_speed"] = round((1 + figures["error"]) * (1 + changed) - 1, 4)
            found.append(figures)
            if abs(changed) <= STEADY:
                break
    best = min(found, key=lambda figures: abs(figures["machine_changed"]))
    others = [
        {name: figures[name] for name in OUTCOMES if name in figures}
        for figures in found
        if figures is not best
    ]
    return best | {"attempts": len(found), "left_out": others}
