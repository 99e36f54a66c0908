"""Which shared resources pairs of devices occupy, as arrays by pair: few, of many resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from skyctl.records.problem import SharedResource

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class SharedSlots:
    """By pair the numbers of the resources that it occupies, and the seconds a byte takes there.

    A pair (a, b) is known as a · devices + b.

    Args:
        shared: the resources, numbered in this order.
        index: by a device's name its number.
        sent: by pair, how many bytes are sent for each byte.
    """

    def __init__(self, shared: Sequence[SharedResource], index: Mapping[str, int], sent: Floats) -> None:
        self.resources = len(shared)
        count = len(index)
        used = np.zeros(count**2, dtype=np.int64)
        self._numbers: list[Ints] = []
        self._byte_s: list[Floats] = []
        for number, resource in enumerate(shared):
            pairs = np.unique([index[source] * count + index[target] for source, target in resource.links])
            if not len(pairs):
                continue
            for slot in np.unique(used[pairs]).tolist():
                if slot == len(self._numbers):
                    self._numbers.append(np.full(count**2, self.resources))
                    self._byte_s.append(np.zeros(count**2))
                here = pairs[used[pairs] == slot]
                self._numbers[slot][here] = number
                self._byte_s[slot][here] = sent[here] / resource.bandwidth_bytes_per_s
            used[pairs] += 1

    def of(self, pair: int) -> list[tuple[int, float]]:
        """The resources that a pair occupies: (number, seconds a byte takes there)."""
        each = zip(self._numbers, self._byte_s, strict=True)
        slots = [(numbers.item(pair), byte_s.item(pair)) for numbers, byte_s in each]
        return [slot for slot in slots if slot[0] < self.resources]

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
        rates: dict[int, float] = {}
        for numbers, byte_s in zip(self._numbers, self._byte_s, strict=True):
            distinct, first = np.unique(numbers.take(pairs), return_index=True)
            for number, at in zip(distinct.tolist(), first.tolist(), strict=True):
                if number < self.resources:
                    rates[number] = 1 / float(byte_s.take(pairs[at]))
        return rates

    def occupies(self, pairs: Ints, number: int) -> npt.NDArray[np.bool_]:
        """By pair, whether it occupies a resource."""
        out = np.zeros(pairs.shape, dtype=bool)
        for numbers in self._numbers:
            out |= numbers.take(pairs) == number
        return out
