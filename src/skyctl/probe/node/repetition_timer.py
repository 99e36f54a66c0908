"""Timing that holds under a CPU quota: repetitions in time slices, on the CPU clock and on the wall clock.

Under a quota a process runs for part of each period and is then held back to its end, so a short wall-clock
measurement sees either the bare speed or a stall. The CPU time of a piece of work is not disturbed by that.
The wall time that goes by per second of CPU time (quota, neighbours, emulated slowdown) is the same for all
work on the device. So: per layer the CPU time per repetition, and the wall/CPU ratio over all the time
spent measuring, the time between repetitions included: stalls are not spread over both evenly. Two things
would make it wrong, and are kept out of it (``wall_cpu_ratio``): waits for a disk while layers are built, and
time saved up under the quota before. If the ratio is not the same for all work (several threads without a
quota that binds, or an accelerator), wall time per repetition is used as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from skyctl.device.device_timer import DeviceTimer
from skyctl.probe.node.samples import MIN_REPEATS, TimingSample, converged
from skyctl.probe.node.wall_cpu_ratio import WallCpuRatio, thread_schedstat

MAX_SAMPLES = 4000

QUOTA_BINDS_SHARE = 0.85
"""A quota holds several threads back where they get at least this part of it."""

WAITING_SHARE = 0.1
"""Layers that wait for so much of their own time are timed by the wall clock."""


class Repetition(Protocol):
    """One repetition in two parts that are timed, after one that is not."""

    def prepare(self) -> None:
        """Makes the tensors that the two parts use up."""

    def forward(self) -> None:
        """The first part that is timed."""

    def between(self) -> None:
        """Does what happens between the two in training; this is not timed."""

    def backward(self) -> None:
        """The second part that is timed."""


class RepetitionTimer:
    """Times repetitions on one device: ``DeviceTimer`` over their two parts.

    ``wall_s`` and ``cpu_s``: of all repetitions and of what was done between them. If a slowdown is
    emulated, of the repetitions alone: the rest is not slowed. ``quota_cpus``: what the process may use of
    processors in the long run, None: all.
    """

    def __init__(
        self,
        device: str,
        slowdown: float = 1.0,
        *,
        single_thread: bool = True,
        quota_cpus: float | None = None,
        period_s: float = 0.0,
    ) -> None:
        self._device_timer = DeviceTimer(slowdown, single_thread=single_thread, device=torch.device(device))
        self._clock = time.thread_time if single_thread else time.process_time
        self.on_cpu = self._device_timer.on_cpu
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self._quota_cpus = quota_cpus
        self._single_thread = single_thread
        self._cpu_clock = self._clock if quota_cpus is None else time.process_time
        """For the wall/CPU ratio: under a quota this process's other threads run at its cost, too."""
        self._last_read: tuple[float, float] | None = None
        self.by_wall = False
        """Set where ``layers_wait``: a second of the CPU then says little."""
        self._waited_s = 0.0
        self._warm_cpu_s = 0.0
        """CPU seconds of the repetitions in which ``_waited_s`` was waited."""
        distinguishes_waits = single_thread and self.on_cpu and slowdown == 1.0
        self.cpu_slices = WallCpuRatio(period_s) if distinguishes_waits else None

    def run(self, part: Callable[[], None]) -> tuple[float, float]:
        """Runs one part. Returns (wall, CPU) seconds, the emulated slowdown in the wall time."""
        before = thread_schedstat() if self.cpu_slices is not None else None
        timed = self._device_timer.run(part)
        after = thread_schedstat() if before is not None else None
        if before is not None and after is not None:
            self._waited_s += max(0.0, timed.wall_s - timed.cpu_s - (after[1] - before[1]))
            self._warm_cpu_s += timed.cpu_s
        return timed.wall_s, timed.cpu_s

    @property
    def by_cpu(self) -> bool:
        """Whether repetitions are judged by the CPU's clock, and not by the wall's."""
        return self.on_cpu and not self.by_wall

    @property
    def layers_wait(self) -> bool:
        """Whether the repetitions themselves wait for other things than a processor (a sleep, a disk)."""
        return self._waited_s > WAITING_SHARE * (self._waited_s + self._warm_cpu_s)

    def warm_up(self, repetition: Repetition) -> None:
        """One repetition whose waits say nothing of the layers: its code may still come from a disk."""
        waited_s, warm_cpu_s = self._waited_s, self._warm_cpu_s
        self.sample(repetition)
        self._waited_s, self._warm_cpu_s = waited_s, warm_cpu_s

    def sample(self, repetition: Repetition) -> TimingSample:
        """Runs one repetition and times its parts."""
        begun = self._last_read or (time.perf_counter(), self._cpu_clock())
        repetition.prepare()
        first = self.run(repetition.forward)
        repetition.between()
        second = self.run(repetition.backward)
        self._last_read = time.perf_counter(), self._cpu_clock()
        if self._device_timer.slowdown == 1.0:
            self.wall_s += self._last_read[0] - begun[0]
            self.cpu_s += self._last_read[1] - begun[1]
            if self.cpu_slices is not None:
                self.cpu_slices.add(self._last_read[0] - begun[0], self._last_read[1] - begun[1])
        else:
            self.wall_s += first[0] + second[0]
            self.cpu_s += first[1] + second[1]
        return TimingSample(*first, *second)

    def wall_cpu_ratio(self) -> float | None:
        """Wall seconds per CPU second over what was measured, or None where layers may differ in it.

        With one thread it is the same for all work. With several, only a quota that binds makes it so: the
        process then gets the quota's CPU time whatever it runs. In the long run nobody gets more than the
        quota: what a saved-up burst allowed for a while is not counted.
        """
        quota = self._quota_cpus
        if not self.by_cpu or self.cpu_s <= 0 or self.wall_s <= 0:
            return None
        if not self._single_thread and (
            quota is None or self.cpu_s / self.wall_s < QUOTA_BINDS_SHARE * quota
        ):
            return None
        ratio = self.wall_s / self.cpu_s
        if self.cpu_slices is not None:
            ratio = self.cpu_slices.ratio() or ratio
        return ratio if quota is None else max(ratio, 1.0 / quota)

    def wall_cpu_ratio_interval(self) -> float:
        """Half of that ratio's 95% interval, relative to it; 0 where it is not used or not known."""
        if self.cpu_slices is None or self.wall_cpu_ratio() is None:
            return 0.0
        return self.cpu_slices.interval()


def collect_samples(
    timer: RepetitionTimer,
    repetition: Repetition,
    *,
    slice_s: float,
    warm_up_s: float = 0.0,
    warm_up_repeats: int = 1,
    least: int = MIN_REPEATS,
    minimum_s: float = 0.0,
    over: Callable[[], bool] = lambda: False,
) -> list[TimingSample]:
    """Warm-up, then repetitions until the mean has converged or the slice is over.

    Args:
        slice_s: wall seconds after which to stop; so many as ``least`` says are done all the same.
        warm_up_s: at least so long and so often is run before what counts.
        minimum_s: not to stop before this much, converged or not.
        over: whether one repetition that counts is enough by now.
    """
    start = time.perf_counter()
    done = 0
    while done < warm_up_repeats or time.perf_counter() - start < warm_up_s:
        timer.warm_up(repetition)
        done += 1
        if over():
            break
    samples: list[TimingSample] = []
    start = time.perf_counter()
    while len(samples) < MAX_SAMPLES:
        samples.append(timer.sample(repetition))
        passed_s = time.perf_counter() - start
        if over():
            break
        if len(samples) < least or passed_s < minimum_s:
            continue
        if passed_s >= slice_s or (len(samples) & 3 == 3 and converged(samples, timer.by_cpu)):
            break
    return samples
