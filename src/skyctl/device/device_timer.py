"""Timing of compute actions, and making a device slower than it is. Worker and probe time alike with it.

The emulated machine is the measured one stretched: an action that takes ``t`` here ends ``slowdown · t``
after its start. The slowdown stretches the action's own work only: with one thread on a CPU the thread's CPU
time, elsewhere wall time. With CPU time, other processes on this machine that hold the core for a while do
not count twice. Autograd's backward runs in the thread that calls it; time asleep is not stretched. A sleep
that overshoots makes later ones shorter.

On a device that is shared by turns an action has the turn from its start to its end, what it is stretched by
included. It is timed from when it has it: what it waited for the turn is no time of the action's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from skyctl.turns.turn_client import NO_TURNS, DeviceTurns, NoTurns

T = TypeVar("T")


@dataclass(frozen=True)
class TimedResult(Generic[T]):
    """An action's result, the wall seconds it took with the pause it was given, and its CPU seconds.

    ``cpu_s`` is the thread's with one thread, the process's with several, and 0 on an accelerator.
    """

    result: T
    wall_s: float
    cpu_s: float


class DeviceTimer:
    """Runs actions, each timed to its end on the device.

    Args:
        slowdown: at least 1; 1 adds nothing.
        single_thread: the work is done by the calling thread alone.
        device: a device whose work is asynchronous is waited for.
        turns: of the device; an action waits for no other machine, so no turn is held meanwhile.
    """

    def __init__(
        self,
        slowdown: float,
        *,
        single_thread: bool,
        device: torch.device,
        turns: DeviceTurns | NoTurns = NO_TURNS,
    ) -> None:
        self.slowdown = slowdown
        self.on_cpu = device.type == "cpu"
        self._by_cpu = single_thread and self.on_cpu
        self._clock = time.thread_time if single_thread else time.process_time
        self._device = device
        self._owed_s = 0.0
        self._turns = turns

    def run(self, action: Callable[[], T]) -> TimedResult[T]:
        """Runs one action and times it to its end on the device."""
        with self._turns.turn():
            return self._run(action)

    def _run(self, action: Callable[[], T]) -> TimedResult[T]:
        start, cpu = time.perf_counter(), self._clock()
        result = action()
        if not self.on_cpu:
            torch.accelerator.synchronize(self._device)
        cpu_s = self._clock() - cpu if self.on_cpu else 0.0
        wall_s = time.perf_counter() - start
        if self.slowdown > 1.0:
            wall_s += self._pause(cpu_s if self._by_cpu else wall_s, wall_s)
        return TimedResult(result, wall_s, cpu_s)

    def _pause(self, work_s: float, spent_s: float) -> float:
        """Sleeps until ``slowdown`` times the work is over; gives the seconds slept."""
        wanted_s = max(0.0, self.slowdown * work_s - spent_s)
        paid_s = min(wanted_s, self._owed_s)
        self._owed_s -= paid_s
        if wanted_s <= paid_s:
            return 0.0
        start = time.perf_counter()
        time.sleep(wanted_s - paid_s)
        slept_s = time.perf_counter() - start
        self._owed_s += max(0.0, slept_s - (wanted_s - paid_s))
        return slept_s
