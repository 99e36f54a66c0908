"""A problem's links as arrays by source and target, made once for all that plans it.

A thousand devices have a million links: tables of numbers take seconds where entries by pair take minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skyctl.planner.shared_slots import SharedSlots
from skyctl.records.problem import Problem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
DevicePair = tuple[int, int]


class LinkCost(NamedTuple):
    """The cost of messages from one device to another.

    ``shared``: for each shared resource that they occupy its index and the seconds a byte takes there.
    """

    latency_s: float
    seconds_per_byte: float
    shared: tuple[tuple[int, float], ...]

    @property
    def slowest_s_per_byte(self) -> float:
        """Seconds a byte takes on the slowest of the link and its shared resources."""
        return max((self.seconds_per_byte, *(rate for _, rate in self.shared)))


class PairValues(Mapping[DevicePair, float]):
    """A table, looked up by (source, target)."""

    def __init__(self, table: Floats) -> None:
        self._table = table

    def __getitem__(self, pair: DevicePair) -> float:
        return self._table.item(pair)

    def __iter__(self) -> Iterator[DevicePair]:
        return _all_pairs(len(self._table))

    def __len__(self) -> int:
        return self._table.size


class PairResources(Mapping[DevicePair, Sequence[tuple[int, float]]]):
    """By (source, target), the shared resources that it occupies: (number, seconds a byte takes there)."""

    def __init__(self, slots: SharedSlots, devices: int) -> None:
        self._slots, self._devices = slots, devices

    def __getitem__(self, pair: DevicePair) -> Sequence[tuple[int, float]]:
        return self._slots.of(pair[0] * self._devices + pair[1]) if self._slots.slots else ()

    def __iter__(self) -> Iterator[DevicePair]:
        return _all_pairs(self._devices)

    def __len__(self) -> int:
        return self._devices**2


def _all_pairs(devices: int) -> Iterator[DevicePair]:
    return ((source, target) for source in range(devices) for target in range(devices))


class LinkTables:
    """Links by source and target, devices as indices in the problem's order.

    Shapes are (devices, devices). Links that are not given are free: they take 0 seconds.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.devices = len(problem.devices)
        self._index = {device.id: d for d, device in enumerate(problem.devices)}
        self._costs: dict[DevicePair, LinkCost] = {}

    @cached_property
    def _ends(self) -> Ints:
        """By link, where its pair is in a table laid out flat."""
        index, count = self._index, self.devices
        links = self._problem.links
        return np.array([index[link.source] * count + index[link.target] for link in links], dtype=np.int64)

    def _table(self, values: list[float], otherwise: float) -> Floats:
        out = np.full(self.devices**2, otherwise)
        out[self._ends] = values
        return out.reshape(self.devices, self.devices)

    @cached_property
    def latency_s(self) -> Floats:
        """Seconds from a message's last byte out to its last byte in."""
        return self._table([link.latency_s for link in self._problem.links], 0.0)

    @cached_property
    def byte_s(self) -> Floats:
        """Seconds that a byte takes on the link itself."""
        return 1 / self._bandwidth

    @cached_property
    def _bandwidth(self) -> Floats:
        return self._table([link.bandwidth_bytes_per_s for link in self._problem.links], np.inf)

    @cached_property
    def _sent(self) -> Floats:
        """Of an activation's bytes, the part that is sent."""
        return self._table([link.sent_share for link in self._problem.links], 1.0)

    @cached_property
    def message_byte_s(self) -> Floats:
        """Seconds that a byte of an activation takes on the link itself."""
        return self._sent / self._bandwidth

    @cached_property
    def slots(self) -> SharedSlots:
        """The shared resources by pair."""
        return SharedSlots(self._problem.shared, self._index, np.ones(self.devices**2))

    @cached_property
    def message_slots(self) -> SharedSlots:
        """The shared resources by pair, with what a byte of an activation takes there."""
        if (self._sent == 1.0).all():
            return self.slots
        return SharedSlots(self._problem.shared, self._index, self._sent.ravel())

    @cached_property
    def line_s(self) -> Floats:
        """Seconds that a byte takes on the slowest of the link and its shared resources."""
        return np.maximum(self.byte_s, self.slots.slowest_s(self._pairs))

    @cached_property
    def message_line_s(self) -> Floats:
        """``line_s`` of a byte of an activation."""
        return np.maximum(self.message_byte_s, self.message_slots.slowest_s(self._pairs))

    @property
    def _pairs(self) -> Ints:
        return np.arange(self.devices**2).reshape(self.devices, self.devices)

    def message_cost(self, source: int, target: int) -> LinkCost:
        """The cost of activations from one device to another."""
        pair = source, target
        cost = self._costs.get(pair)
        if cost is None:
            cost = self._costs[pair] = LinkCost(
                self.latency_s.item(pair),
                self.message_byte_s.item(pair),
                tuple(self.message_slots.of(source * self.devices + target)),
            )
        return cost
