"""The most layers that one edge per device can hold, edges in and out balanced at every node.

Exactly by max-plus dynamic programming over the devices, and bounded by potentials of the nodes.

The state is, for all phases but one, how many more stages end there than start, and for every other node
whether a stage has ended and has started there. After i of D devices no imbalance beyond min(i, D − i) can
come back to nothing, so a window of D / 2 is exact; a narrow one finds good plans sooner. Whether the stages
connect is not asked: less than all layers is a proof that there is no plan, L or more is not yet one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skyctl.planner.bottleneck.reach_table import Floats, Ints
from skyctl.planner.bottleneck.repeated_layers import NO_EDGE, StageEdge, StageEdges
from skyctl.planner.linear_programs import CuttingPlanes

Table = npt.NDArray[np.int32]
Cut = tuple[slice | int, ...]
EdgeChoice = list[int]
"""By device its edge, or −1."""
MAX_CUTS = 150
LAYER_ROUNDING = 1e-6
"""In layers: less is not trusted to be more than rounding."""


class EdgeStep(NamedTuple):
    """The step along an edge: states ``source`` become states ``target``."""

    edge: int
    source: Cut
    target: Cut


def count_states(phases: int, nodes: int, window: int) -> int:
    """How many states the dynamic program has, at most."""
    inner = nodes - phases - 2
    return int(4 ** (1 + inner) * (2 * window + 1) ** (phases - 1))


class EdgeBalance:
    """For ``edges`` between the nodes 0 … ``phases`` − 1, which are phases, … ``nodes`` − 1, which are not.

    ``window``: the largest imbalance kept.
    """

    def __init__(
        self, edges: list[StageEdge], phases: int, nodes: int, source: int, sink: int, window: int
    ) -> None:
        self.window = window
        self.phases = phases
        self.source, self.sink = source, sink
        self.inner = [x for x in range(phases, nodes) if x not in (source, sink)]
        self.flags = 2 + 2 * len(self.inner)
        self._inside: Cut = (slice(None),) * self.flags + (slice(1, -1),) * (phases - 1)
        self.loops = [e for e, edge in enumerate(edges) if edge.source == edge.target]
        self.steps = [
            EdgeStep(e, *self._step(edge)) for e, edge in enumerate(edges) if edge.source != edge.target
        ]

    def _axis(self, node: int, *, ends: bool) -> int:
        """The axis of the flag of a node outside the run."""
        if node == self.source:
            return 0
        if node == self.sink:
            return 1
        return 2 + 2 * self.inner.index(node) + ends

    def _step(self, edge: StageEdge) -> tuple[Cut, Cut]:
        before: list[slice | int] = [slice(None)] * (self.flags + self.phases - 1)
        after: list[slice | int] = [slice(None)] * (self.flags + self.phases - 1)
        for node, sign in ((edge.source, -1), (edge.target, 1)):
            if node >= self.phases:
                axis = self._axis(node, ends=sign > 0)
                before[axis], after[axis] = 0, 1
            elif node < self.phases - 1:
                axis = self.flags + node
                lower, upper = slice(0, -1), slice(1, None)
                before[axis], after[axis] = (lower, upper) if sign > 0 else (upper, lower)
        return tuple(before), tuple(after)

    def most(self, lengths: Ints) -> int:
        """The most layers in all; lengths: [device, edge]."""
        table = self._nothing()
        for i, row in enumerate(lengths):
            table = self._next(table, row, self._widths(i, len(lengths)))
        return max(int(table[flags][self._middle(0)]) for flags in self._ends())

    def choose(self, lengths: Ints) -> tuple[int, EdgeChoice]:
        """The most layers in all, and a choice of edges that holds them; lengths: [device, edge]."""
        count = len(lengths)
        tables = [self._nothing()]
        for i, row in enumerate(lengths):
            tables.append(self._next(tables[-1], row, self._widths(i, count)))
        most, flags = max((int(tables[-1][flags][self._middle(0)]), flags) for flags in self._ends())
        chosen: EdgeChoice = [-1] * count
        at = (*flags, *self._middle(0))
        if most > 0:
            for i in range(count - 1, -1, -1):
                chosen[i], at = self._back((tables[i], tables[i + 1]), lengths[i], at, self._widths(i, count))
        return most, chosen

    def _nothing(self) -> Table:
        table = np.full((2,) * self.flags + (1,) * (self.phases - 1), NO_EDGE, dtype=np.int32)
        table[(0,) * self.flags] = 0
        return table

    def _widths(self, i: int, count: int) -> tuple[int, int]:
        """The largest imbalance kept before and after the device ``i``."""
        return min(self.window, i, count - i), min(self.window, i + 1, count - i - 1)

    def _middle(self, width: int) -> tuple[int, ...]:
        return (width,) * (self.phases - 1)

    def _next(self, table: Table, row: Ints, widths: tuple[int, int]) -> Table:
        before, after = widths
        if after > before:
            larger = np.full(
                (2,) * self.flags + (2 * after + 1,) * (self.phases - 1), NO_EDGE, dtype=np.int32
            )
            larger[self._inside] = table
            table = larger
        stay = max([0, *(int(row[e]) for e in self.loops)])
        new = table + np.int32(stay)
        for e, source, target in self.steps:
            if row[e] > 0:
                view = new[(*target, ...)]  # with one phase the table has flags only: a view all the same
                np.maximum(view, table[source] + np.int32(row[e]), out=view)
        if after < before:
            new = np.ascontiguousarray(new[self._inside])
        return new

    def _back(
        self, tables: tuple[Table, Table], row: Ints, at: tuple[int, ...], widths: tuple[int, int]
    ) -> tuple[int, tuple[int, ...]]:
        """Which edge led to a state, and from which state."""
        value = int(tables[1][at])
        shift = widths[0] - widths[1]
        same = at[: self.flags] + tuple(x + shift for x in at[self.flags :])  # in the earlier table's places
        loop = max(self.loops, key=lambda e: int(row[e]), default=-1)
        stay = max(0, int(row[loop])) if loop >= 0 else 0
        if self._value(tables[0], same) + stay == value:
            return (loop if stay else -1), same
        for e, source, target in self.steps:
            if row[e] <= 0:
                continue
            before = []
            for x, here, there in zip(same, source, target, strict=True):
                if isinstance(there, int):
                    before.append(int(here == 0 and x == 1) - 1)  # 0, or nowhere
                else:
                    assert isinstance(here, slice)
                    before.append(x + (here.start or 0) - (there.start or 0))
            if self._value(tables[0], before) + int(row[e]) == value:
                return e, tuple(before)
        raise AssertionError("no edge leads there")

    @staticmethod
    def _value(table: Table, at: Sequence[int]) -> int:
        inside = all(0 <= x < size for x, size in zip(at, table.shape, strict=True))
        return int(table[tuple(at)]) if inside else 2 * NO_EDGE

    def _ends(self) -> list[tuple[int, ...]]:
        """The flags of all states in which every node outside the run is balanced."""
        out: list[tuple[int, ...]] = []
        for bits in range(1 << len(self.inner)):
            flags = [1, 1]
            for i in range(len(self.inner)):
                flags += [bits >> i & 1] * 2
            out.append(tuple(flags))
        return out


def potential_bound(edges: StageEdges, lengths: Ints, sizes: Ints) -> tuple[float, Floats]:
    """(upper bound on the layers that one edge per device can hold, its potentials); lengths: [class, edge].

    For any number of devices, and nearly always as exact as ``EdgeBalance``. A potential u per node makes an
    edge worth length + u[source] − u[target]; what balances is worth its length, whatever u. So with each
    device at its best edge the sum is an upper bound on all lengths: below L it refutes the limit. The best
    potentials are the linear relaxation's; in layers' terms they are prices that repeat.

    The least one that potentials give, but no more effort than tells whether it is below all layers.
    """
    nodes = edges.run.period + len(edges.places)
    effect = np.zeros((len(edges.edges) + 1, nodes))  # the last: no edge
    for e, edge in enumerate(edges.edges):
        effect[e, edge.source] += 1
        effect[e, edge.target] -= 1
    ends = np.zeros(nodes)
    ends[edges.source], ends[edges.sink] = -1, 1
    values = np.hstack((np.where(lengths > 0, lengths, NO_EDGE), np.zeros((len(lengths), 1), dtype=np.int64)))
    cuts = CuttingPlanes(nodes - 1, float(max(2, lengths.max())))  # potentials count against node 0's
    best = np.inf
    best_point = point = np.zeros(nodes)
    for _ in range(MAX_CUTS):
        value = values + effect @ point
        chosen = np.argmax(value, axis=1)
        most = float(value[np.arange(len(value)), chosen] @ sizes + ends @ point)
        if most < best:
            best, best_point = most, point
        if best < edges.model.layers - 2 * LAYER_ROUNDING:
            break
        slope = sizes @ effect[chosen] + ends
        cuts.add(most - float(slope @ point), slope[1:])
        least = cuts.least()
        if least is None or least[0] >= min(best, edges.model.layers) - LAYER_ROUNDING:
            break
        point = np.concatenate(([0.0], least[1]))
    return best, best_point
