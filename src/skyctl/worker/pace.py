"""Timing of compute actions, and making a device slower than it is.

The emulated machine is the measured one stretched: an action that takes ``t`` here ends ``slowdown · t``
after its start. What is stretched is the action's own work: with one thread on a CPU the thread's CPU time,
so that other processes on this machine that hold the core for a while do not count twice (autograd's backward
runs in the thread that calls it; time asleep is not stretched); elsewhere wall time. A sleep that overshoots
makes the next one shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Pace:
    """Runs actions, each with its time in seconds.

    Args:
        slowdown: at least 1; 1 adds nothing.
        single_thread: the work is done by the calling thread alone.
        device: a device whose work is asynchronous is waited for.
    """

    def __init__(self, slowdown: float, *, single_thread: bool, device: torch.device) -> None:
        self.slowdown = slowdown
        self._cpu_time = single_thread and device.type == "cpu"
        self._device = device
        self._owed_s = 0.0

    def run(self, action: Callable[[], T]) -> tuple[T, float]:
        """The action's result and the seconds it took, the added ones included."""
        start = time.perf_counter()
        if self.slowdown <= 1.0:
            result = action()
            self._settle()
            return result, time.perf_counter() - start
        busy = time.thread_time()
        result = action()
        self._settle()
        busy = time.thread_time() - busy
        spent = time.perf_counter() - start
        target = self.slowdown * (busy if self._cpu_time else spent) - self._owed_s
        if target <= spent:
            return result, spent
        time.sleep(target - spent)
        spent = time.perf_counter() - start
        self._owed_s = spent - target
        return result, spent

    def _settle(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
