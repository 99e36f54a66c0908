"""Which shared resources pairs of devices occupy, as arrays by pair: few, of many resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class SharedSlots:
    """By pair the numbers of the resources that it occupies, and the seconds a byte takes there.

    Args:
        shared: by pair, (number, seconds a byte).
        devices: how many there are; a pair (a, b) is also known as a · devices + b.
        resources: how many there are.
    """

    def __init__(
        self, shared: Mapping[tuple[int, int], Sequence[tuple[int, float]]], devices: int, resources: int
    ) -> None:
        self.resources = resources
        count = max(map(len, shared.values()), default=0)
        self._numbers = [np.full((devices, devices), resources) for _ in range(count)]
        self._byte_s = [np.zeros((devices, devices)) for _ in range(count)]
        for pair, used in shared.items():
            for slot, (number, byte_s) in enumerate(used):
                self._numbers[slot][pair], self._byte_s[slot][pair] = number, byte_s

    @property
    def slots(self) -> int:
        """The most resources that a pair occupies."""
        return len(self._numbers)

    def busiest_s(self, pairs: Ints, columns: Ints, size: Floats | float, count: int) -> Floats:
        """By column, the seconds that messages occupy the resource that they occupy most.

        Args:
            pairs: the links of the messages, of any shape.
            columns: by message its column, of 0 to ``count`` − 1; as ``pairs``, or broadcast to it.
            size: bytes by message, or of each.
        """
        loads = np.zeros((self.resources + 1) * count)  # the last resource stands for none
        for numbers, byte_s in zip(self._numbers, self._byte_s, strict=True):
            at = numbers.take(pairs) * count + columns
            seconds = byte_s.take(pairs) * size
            loads += np.bincount(at.ravel(), seconds.ravel(), minlength=len(loads))
        if not self.resources:
            return np.zeros(count)
        out: Floats = loads.reshape(-1, count)[:-1].max(axis=0)
        return out

    def slowest_s(self, pairs: Ints) -> Floats:
        """By pair, seconds a byte takes on the slowest resource that it occupies; as ``pairs`` in shape."""
        out = np.zeros(pairs.shape)
        for byte_s in self._byte_s:
            np.maximum(out, byte_s.take(pairs), out=out)
        return out

    def rates_of(self, pairs: Ints) -> dict[int, float]:
        """Of the resources that these pairs occupy, by number, the bytes a second."""
        found: dict[int, float] = {}
        for numbers, byte_s in zip(self._numbers, self._byte_s, strict=True):
            known, first = np.unique(numbers.take(pairs), return_index=True)
            for number, at in zip(known.tolist(), first.tolist(), strict=True):
                if number < self.resources:
                    found[number] = 1 / float(byte_s.take(pairs[at]))
        return found

    def occupies(self, pairs: Ints, number: int) -> npt.NDArray[np.bool_]:
        """By pair, whether it occupies a resource."""
        out = np.zeros(pairs.shape, dtype=bool)
        for numbers in self._numbers:
            out |= numbers.take(pairs) == number
        return out
