"""The costs of sums of gradients: the bytes of each layer, and the links and processors that they go over.

Devices are indices in the problem's order. The model is the contract's (``docs/contract.md``, Data
parallelism, Hybrids).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from skyctl.planner.link_tables import DevicePair, LinkTables, PairResources, PairValues
from skyctl.planner.shared_slots import SharedSlots
from skyctl.planner.summed_bytes import summed_bytes
from skyctl.records.problem import Problem
from skyctl.records.sync import Sync

CHUNK_BYTES: int = Sync.model_fields["chunk_bytes"].default
"""Gradients are sent in pieces of so many bytes, the fewest for a processor to handle."""
SHORT_CHUNK_BYTES = 65536
"""Of pieces on slow lines, which a long one would hold up; a byte in them takes a processor twice as long."""
SLOW_BYTE_S = 4e-8
"""A line is slow from so many seconds a byte on: 200 Mbit/s."""
EDGE_BYTES = 2 << 20
"""The bytes that a replica keeps room for, per edge of a route that arrives at it with partial sums."""
MOST_HELPERS = 4
"""Devices that may help any replicas over trees; of more, those with the fattest lines."""

Floats = npt.NDArray[np.float64]


class SumCosts:
    """The bytes that the sums of one problem send, and over which lines. Read only.

    Attributes:
        links: tables of them.
        ids: the devices' names.
        layer_bytes: by layer, bytes of its gradient as they are sent, a second pass included.
        second_bytes: by layer, the second pass's part of ``layer_bytes``.
        passes: how many sums, one after another, a step has.
        total_bytes: of all layers' gradients as they are sent.
    """

    def __init__(self, problem: Problem, links: LinkTables | None = None) -> None:
        self.problem = problem
        self.links = LinkTables(problem) if links is None else links
        self.ids = [device.id for device in problem.devices]
        sizes = summed_bytes(problem)
        self.second_bytes = [size.second for size in sizes]
        self.passes = 2 if any(self.second_bytes) else 1
        self.layer_bytes = [size.first + size.second for size in sizes]
        self.total_bytes = math.fsum(self.layer_bytes)

    @cached_property
    def latency_s(self) -> Mapping[DevicePair, float]:
        """By pair, seconds of latency of all passes; 0 without a link."""
        return PairValues(self.latency_table)

    @cached_property
    def byte_s(self) -> Mapping[DevicePair, float]:
        """By pair, seconds a byte takes on the link; 0 without one."""
        return PairValues(self.byte_table)

    @cached_property
    def shared(self) -> Mapping[DevicePair, Sequence[tuple[int, float]]]:
        """By pair, the shared resources that it occupies: (number, seconds a byte takes there)."""
        return PairResources(self.slots, len(self.ids))

    def line_byte_s(self, source: int, target: int) -> float:
        """Seconds that a byte takes on the slowest of a link and its shared resources."""
        return self.line_table.item(source, target)

    @property
    def slots(self) -> SharedSlots:
        """The shared resources by pair."""
        return self.links.slots

    @property
    def byte_table(self) -> Floats:
        """``byte_s`` by source and target."""
        return self.links.byte_s

    @cached_property
    def latency_table(self) -> Floats:
        """``latency_s`` by source and target."""
        return self.passes * self.links.latency_s

    @property
    def line_table(self) -> Floats:
        """``line_byte_s`` by source and target."""
        return self.links.line_s

    def lines_rate(self, device: int, others: Sequence[int], *, arriving: bool = False) -> float:
        """The most bytes a second over a device's lines to others all at once, or from them (``arriving``).

        One resource that some of the lines share is looked at.
        """
        there = np.asarray(others, dtype=np.int64)
        pairs = there * len(self.ids) + device if arriving else device * len(self.ids) + there
        with np.errstate(divide="ignore"):
            rates = 1 / self.line_table.take(pairs)
        least = float(rates.sum())
        for number, rate in self.slots.rates_of(pairs).items():
            shared = self.slots.occupies(pairs, number)
            if rate < rates[shared].sum():
                least = min(least, rate + float(rates[~shared].sum()))
        return least

    def late_bytes(self, start: int, stop: int) -> list[float]:
        """``layer_bytes`` of layers that are summed together: a second pass comes with the first layer.

        That layer's gradients come last, and the second pass begins when the first has ended.
        """
        late = self.second_bytes[start:stop]
        sizes = [size - x for size, x in zip(self.layer_bytes[start:stop], late, strict=True)]
        return [sizes[0] + math.fsum(late), *sizes[1:]]

    def edge_bytes(self, children: int) -> float:
        """The further bytes that a replica keeps if so many edges of routes arrive at it.

        With a parameter server that is also a buffer for its own gradients, and at the root the weights that
        pushes are applied to, and a buffer for each other worker.
        """
        if not self.problem.rhythm.is_stale:
            return buffer_bytes(children)
        return buffer_bytes(children) + self.total_bytes * (1 + (1 + children if children else 0))

    @cached_property
    def _helper_order(self) -> list[int]:
        """The devices that may help if they hold nothing, those with the fattest lines first."""
        named, count = self.problem.helpers, len(self.ids)
        able = [d for d in range(count) if named is None or self.ids[d] in named]

        def line_rate(d: int) -> float:
            others = [x for x in range(count) if x != d]
            return min(self.lines_rate(d, others), self.lines_rate(d, others, arriving=True))

        return sorted(able, key=line_rate, reverse=True)

    def helpers_of(self, replicas: Collection[int]) -> tuple[int, ...]:
        """The devices that may help these replicas: none in a ring and in a star, few with trees."""
        if not self._may_help:
            return ()
        helpers = [d for d in self._helper_order if d not in replicas]
        return tuple(sorted(helpers if self.problem.sync == "server" else helpers[:MOST_HELPERS]))

    def any_helpers(self) -> tuple[int, ...]:
        """The devices that may help some replicas or other."""
        return tuple(self._helper_order) if self._may_help else ()

    @property
    def _may_help(self) -> bool:
        """Whether devices may help: neither pipelines side by side nor rings and stars have them."""
        return self.problem.parallel == "data" and self.problem.sync not in ("ring", "star")


def buffer_bytes(children: int) -> float:
    """Bytes of the chunks that a replica with that many arriving edges keeps room for."""
    return float(children * EDGE_BYTES)


def message_factor(problem: Problem, byte_s: float) -> float:
    """By how much ``message_byte_s`` counts if a byte takes so long, or longer, on the busiest line.

    Twice where pieces are short and sums are made next to layers, so that nothing hides it; else once.
    """
    return 2.0 if problem.rhythm.delay and byte_s >= SLOW_BYTE_S else 1.0


def chunk_bytes_at(byte_s: float, passes: int = 1) -> int:
    """In pieces of how many bytes gradients are sent if a byte takes so long on the busiest line.

    Of several passes each begins when the last piece of the one before has gone all the way: a quarter.
    """
    size = SHORT_CHUNK_BYTES if byte_s >= SLOW_BYTE_S else CHUNK_BYTES
    return size if passes == 1 else size // 4
