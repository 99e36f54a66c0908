"""Which trial starts where: the longest first, each on the device that would end it soonest. Pure.

A device that is busy may still end a trial sooner than one that is free: then the trial waits for it. So no
slow device begins a long trial at the end, when a fast one would be free in time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skyctl.sweep.trial_times import ParameterNumbers, TimedTrial, TrialTimes


@dataclass(frozen=True)
class _Started:
    device: str
    at: float


class TrialQueue:
    """The trials of a sweep and the places for them. Times are seconds of any one clock.

    Args:
        speeds: by device, how fast it is, in any unit.
        per_device: trials that share a device.
    """

    def __init__(self, speeds: Mapping[str, float], per_device: int = 1) -> None:
        self._speeds, self._per_device = dict(speeds), per_device
        self._devices = list(speeds)
        self._parameters: dict[int, Mapping[str, str]] = {}
        self._waiting: set[int] = set()
        self._running: dict[int, _Started] = {}
        self._timed: list[TimedTrial] = []
        self._numbers: ParameterNumbers | None = None
        self._times: TrialTimes | None = None
        self._work: dict[int, float] = {}

    @property
    def waiting(self) -> int:
        """How many trials wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many trials run."""
        return len(self._running)

    @property
    def free(self) -> int:
        """How many more trials could run at once."""
        return len(self._devices) * self._per_device - len(self._running)

    @property
    def devices(self) -> Sequence[str]:
        """The devices that are left."""
        return self._devices

    def add(self, number: int, parameters: Mapping[str, str]) -> None:
        """A trial that is to run."""
        self._parameters[number] = parameters
        self._waiting.add(number)
        self._numbers = self._times = None

    def add_timed(self, trial: TimedTrial) -> None:
        """A trial that has ended by itself, perhaps before; on another cluster it says nothing."""
        if trial.device in self._speeds:
            self._timed.append(trial)
            self._times = None

    def end(self, number: int) -> None:
        """A trial runs no more. One that ended by itself is also given to ``add_timed``."""
        del self._running[number]

    def put_back(self, number: int) -> None:
        """A trial that ran is to run once more."""
        del self._running[number]
        self._waiting.add(number)

    def lose(self, devices: Iterable[str]) -> None:
        """Starts nothing there any more. Trials that ran there are to be ended or put back."""
        gone = set(devices)
        self._devices = [device for device in self._devices if device not in gone]

    def start(self, now: float) -> list[tuple[int, str]]:
        """The trials that begin now, each with its device; they count as running."""
        if not self._waiting or self.free <= 0:
            return []
        times = self._predicted()
        pace = {device: times.pace(device) for device in self._devices}
        slots = self._slots(now, pace)
        begun: list[tuple[int, str]] = []
        free = self.free
        for number in sorted(self._waiting, key=lambda number: (-self._work[number], number)):
            if free == 0:
                break
            work = self._work[number]
            device = min(
                self._devices, key=lambda one: (slots[one][0][0] + work * pace[one], slots[one][0][1])
            )
            free_at, is_busy = slots[device][0]
            heapq.heapreplace(slots[device], (free_at + work * pace[device], True))
            if not is_busy:
                begun.append((number, device))
                free -= 1
        for number, device in begun:
            self._waiting.discard(number)
            self._running[number] = _Started(device, now)
        return begun

    def _predicted(self) -> TrialTimes:
        if self._numbers is None:
            self._numbers = ParameterNumbers(list(self._parameters.values()))
        if self._times is None:
            self._times = TrialTimes(self._timed, self._numbers, self._speeds)
            self._work = {number: self._times.work(p) for number, p in self._parameters.items()}
        return self._times

    def _slots(self, now: float, pace: Mapping[str, float]) -> dict[str, list[tuple[float, bool]]]:
        """By device, a heap of its places: in how many seconds each is free, and whether it is busy now."""
        slots: dict[str, list[tuple[float, bool]]] = {device: [] for device in self._devices}
        for number, started in self._running.items():
            if started.device not in slots:
                continue
            left = self._work[number] * pace[started.device]
            if self._timed:
                # One that takes longer than predicted may take as long again as it is over.
                left = abs(left - (now - started.at))
            slots[started.device].append((left, True))
        for places in slots.values():
            places.extend([(0.0, False)] * (self._per_device - len(places)))
            heapq.heapify(places)
        return slots
