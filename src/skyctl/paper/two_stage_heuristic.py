"""Sky Computing's two-stage heuristic as published (Zhu et al. 2022, arXiv 2202.11836, ``dynamic_allocate``).

First from the even split boundaries are moved until every device's memory holds its share; then, for up to
``ROUNDS`` rounds, each device below the mean load (flops × its benchmark time) takes a layer from its next
neighbour where memory allows. The published code also has a branch that hands a layer on to the next device.
Its condition takes the load of the device itself for the load of the next one, and asks it to be below the
mean and above it at once; so that branch is never taken, and a slow early device keeps what it has.
``compare_next=True`` takes the next device's load instead, as the paper's text describes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from skyctl.errors import UndecidedError

ROUNDS = 1000
"""The published ``break_iter``."""


def two_stage_cuts(
    work: Sequence[float],
    need: Sequence[float],
    room: Sequence[float],
    times: Sequence[float],
    *,
    compare_next: bool = False,
) -> list[int]:
    """The starts of devices' ranges, and the end: device d gets layers [cuts[d], cuts[d + 1]), at least one.

    Args:
        work: per layer, in any unit.
        need: bytes per layer.
        room: bytes per device; infinity where unlimited.
        times: per device, of the same benchmark.

    Raises:
        UndecidedError: fewer layers than devices, or the first stage found no split that fits.
    """
    devices, layers = len(room), len(work)
    if devices > layers:
        raise UndecidedError("the two-stage heuristic needs a layer for each device")
    share, more = divmod(layers, devices)
    cuts = [0, *accumulate(share + (d < more) for d in range(devices))]
    shares = _Shares(cuts, work, need, room, times)
    shares.fit_memory()
    shares.level(compare_next=compare_next)
    return cuts


def _prefix(values: Sequence[float]) -> list[float]:
    """The sums of the first values: [0, v0, v0 + v1, …]."""
    return list(accumulate(values, initial=0.0))


class _Shares:
    """The boundaries between devices' ranges while they are moved, and what each range weighs."""

    def __init__(
        self,
        cuts: list[int],
        work: Sequence[float],
        need: Sequence[float],
        room: Sequence[float],
        times: Sequence[float],
    ) -> None:
        scale = 1e9 / (sum(work) / len(work))  # its target is rounded down to whole flops of such a size
        self.cuts = cuts
        self.work = _prefix([value * scale for value in work])
        self.need = _prefix(need)
        self.room = room
        self.slow = [value / min(times) for value in times]
        self.devices = len(room)

    def bytes_of(self, start: int, stop: int) -> float:
        return self.need[stop] - self.need[start]

    def load(self, device: int) -> float:
        """Flops × slowdown of what a device holds."""
        start, stop = self.cuts[device : device + 2]
        return (self.work[stop] - self.work[start]) * self.slow[device]

    def fits(self) -> bool:
        return all(
            self.bytes_of(*self.cuts[d : d + 2]) <= self.room[d] * (1 + 1e-12) for d in range(self.devices)
        )

    def fit_memory(self) -> None:
        """First stage. Raises UndecidedError where its sweeps change nothing and it does not fit."""
        while not self.fits():
            before = list(self.cuts)
            for d in range(self.devices - 1):
                self._fit_one(d)
                if self.fits():
                    return
            if self.cuts == before:
                raise UndecidedError("the two-stage heuristic's first stage found no split that fits")

    def _fit_one(self, d: int) -> None:
        """Gives layers to the next device while d is too full, else takes them while they fit."""
        cuts = self.cuts
        while (
            self.bytes_of(cuts[d], cuts[d + 1]) > self.room[d]
            and cuts[d + 1] - cuts[d] > 1
            and not self.fits()
        ):
            cuts[d + 1] -= 1
        while (
            not self.fits()
            and cuts[d + 2] - cuts[d + 1] > 1
            and self.bytes_of(cuts[d], cuts[d + 1] + 1) < self.room[d]
        ):
            cuts[d + 1] += 1

    def level(self, *, compare_next: bool) -> None:
        """Second stage: layers move from loaded devices to idle neighbours, for up to ``ROUNDS`` rounds."""
        for _ in range(ROUNDS):
            before = list(self.cuts)
            target = sum(map(self.load, range(self.devices))) // self.devices
            for d in range(self.devices - 1):
                self._level_one(d, target, compare_next)
            if self.cuts == before:
                break

    def _level_one(self, d: int, target: float, compare_next: bool) -> None:
        cuts = self.cuts
        own = self.load(d)
        if own < target and cuts[d + 2] - cuts[d + 1] > 1:
            if self.bytes_of(cuts[d], cuts[d + 1] + 1) < self.room[d]:
                cuts[d + 1] += 1
            return
        last = (self.work[cuts[d + 1]] - self.work[cuts[d + 1] - 1]) * self.slow[d]
        following = self.load(d + 1) if compare_next else own
        if (
            following < target
            and own > target + last
            and cuts[d + 1] - cuts[d] > 1
            and self.bytes_of(cuts[d + 1] - 1, cuts[d + 2]) < self.room[d + 1]
        ):
            cuts[d + 1] -= 1
