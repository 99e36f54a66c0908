"""Objective ``bottleneck`` where layers repeat: exact for dozens of different devices, good plans for many.

Whether a limit holds is a choice of one edge per device (``repeated_layers.py``). Potentials of the nodes
refute limits, dynamic programming over the imbalance of the phases in a narrow window finds plans
(``balanced_edges.py``). If these two do not meet, the full window decides, or CP-SAT if that is too
wide or the edges found do not connect. Memory that depends on a stage's position is bounded by the least in
flight, and a plan found is checked with the true numbers. From edges to a plan: one Eulerian path through all
of them (Hierholzer 1873), then stages shortened to fit.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence

import numpy as np

from skyctl.planner.bottleneck.balanced_edges import (
    LAYER_ROUNDING,
    EdgeBalance,
    EdgeChoice,
    count_states,
    potential_bound,
)
from skyctl.planner.bottleneck.cp_sat import solve_balanced_edges
from skyctl.planner.bottleneck.reach_table import SUM_SLACK, Ints, ReachTable
from skyctl.planner.bottleneck.repeated_layers import LayerRun, StageEdges, needless_cuts
from skyctl.planner.cost_model import CostModel, Placement, consecutive
from skyctl.planner.evaluation import BoundKind, bottleneck_s
from skyctl.records.plan import Witness

DeviceEdge = tuple[int, int]
"""(device, edge)."""


def place_edges(model: CostModel, edges: StageEdges, choice: EdgeChoice, lengths: Ints) -> Placement | None:
    """A plan of the chosen edges; None: they do not connect, or can't be shortened to the model's layers.

    Args:
        choice: per device its edge, or −1.
        lengths: [device, edge] the longest.
    """
    stages = _connected(edges, choice, lengths)
    if stages is None:
        return None
    order = _eulerian_path(model, edges, stages)
    if order is None:
        return None
    sizes = _shortened_sizes(model, edges, order, lengths)
    if sizes is None:
        return None
    return consecutive((d, size) for (d, _), size in zip(order, sizes, strict=True) if size)


def _connected(edges: StageEdges, choice: EdgeChoice, lengths: Ints) -> list[DeviceEdge] | None:
    """The chosen edges that the path can reach; None: they hold too few layers.

    A stage that starts and ends in the same phase may do so in any phase that is reached.
    """
    stages = [(d, e) for d, e in enumerate(choice) if e >= 0]
    links = [(edges.edges[e].source, edges.edges[e].target) for _, e in stages]
    seen = {edges.source}
    grown = True
    while grown:
        near = {b for a, b in links if a in seen} | {a for a, b in links if b in seen}
        grown = not near <= seen
        seen |= near
    loops = [e for e, x in enumerate(edges.edges) if x.source == x.target and x.source in seen]
    out: list[DeviceEdge] = []
    for (d, e), (a, b) in zip(stages, links, strict=True):
        if a == b and loops:
            e = max(loops, key=lambda loop: int(lengths[d, loop]))  # noqa: PLW2901
        if edges.edges[e].source in seen and lengths[d, e] > 0:
            out.append((d, e))
    return out if sum(int(lengths[d, e]) for d, e in out) >= edges.model.layers else None


def _eulerian_path(
    model: CostModel, edges: StageEdges, stages: Sequence[DeviceEdge]
) -> list[DeviceEdge] | None:
    """All edges one after the other, from the source to the sink; None: there is no such path.

    Devices with much memory come first where there is a choice: 1F1B keeps more in flight there.
    """
    edges_from: dict[int, list[DeviceEdge]] = {}
    for d, e in sorted(stages, key=lambda stage: (-min(model.available_bytes[stage[0]], 1e300), stage)):
        edges_from.setdefault(edges.edges[e].source, []).append((d, e))
    path: list[DeviceEdge] = []
    stack: list[tuple[int, DeviceEdge | None]] = [(edges.source, None)]
    while stack:
        node, by = stack[-1]
        if edges_from.get(node):
            d, e = edges_from[node].pop(0)
            stack.append((edges.edges[e].target, (d, e)))
        else:
            stack.pop()
            if by is not None:
                path.append(by)
    path.reverse()
    node = edges.source
    for _, e in path:
        if edges.edges[e].source != node:
            return None
        node = edges.edges[e].target
    return path if len(path) == len(stages) and node == edges.sink else None


def _shortened_sizes(
    model: CostModel, edges: StageEdges, order: Sequence[DeviceEdge], lengths: Ints
) -> list[int] | None:
    """Layers by stage, the model's in all: the slowest stage is shortened by a period until they are."""
    period = edges.run.period
    sizes = [int(lengths[stage]) for stage in order]
    least = [0 if edges.edges[e].source == edges.edges[e].target else edges.edges[e].least for _, e in order]
    reach = edges.reach
    row = {d: i for i, group in enumerate(reach.members) for d in group}
    means = [reach.work[reach.timing[row[d]], -1] / model.layers for d, _ in order]
    excess = sum(sizes) - model.layers
    heap = [(-sizes[i] * means[i], i) for i in range(len(order)) if sizes[i] - period >= least[i]]
    heapq.heapify(heap)
    while excess >= period and heap:
        i = heapq.heappop(heap)[1]
        sizes[i] -= period
        excess -= period
        if sizes[i] - period >= least[i]:
            heapq.heappush(heap, (-sizes[i] * means[i], i))
    return sizes if excess == 0 else None


FEW_STATES = 4_096
MANY_STATES = 1 << 25
MAX_TABLES = 1 << 26
STATES_PER_S = 2e8
"""Device by edge by state: slower than any machine that runs this, so that a proof begun is finished."""
EQUAL_SUMS = 5e-10
"""A plan better by less than this, relative, counts as equal: sums of equal layers round differently."""


class PeriodicSearch:
    """The question whether a limit holds, and the search for the least one."""

    def __init__(self, model: CostModel, reach: ReachTable, run: LayerRun) -> None:
        self.model, self.reach, self.run = model, reach, run
        self._edges: dict[tuple[int, ...], StageEdges] = {}
        self._row = np.empty(model.devices, dtype=np.int64)
        for row, group in enumerate(reach.members):
            self._row[group] = row

    def edges(self, kept: tuple[int, ...]) -> StageEdges:
        """All edges between the kept positions and the phases."""
        edges = self._edges.get(kept)
        if edges is None:
            edges = self._edges[kept] = StageEdges(self.model, self.reach, self.run, kept)
        return edges

    def kept(self, limit_s: float) -> tuple[int, ...]:
        """The positions outside the run at which a plan within the limit may need to cut."""
        outside = {*range(1, self.run.start), *range(self.run.stop + 1, self.model.layers)}
        return tuple(sorted(outside - needless_cuts(self.reach, self.run, limit_s)))

    def _balance(self, edges: StageEdges, window: int) -> EdgeBalance:
        nodes = self.run.period + len(edges.places)
        return EdgeBalance(edges.edges, self.run.period, nodes, edges.source, edges.sink, window)

    def _states(self, kept: tuple[int, ...], window: int) -> int:
        p = self.run.period
        return count_states(p, p + 2 + len(kept), window)

    def find(self, limit_s: float, most_states: int = FEW_STATES) -> Placement | None:
        """A plan within the limit (but for rounding), or None: none was found."""
        limit_s *= 1 + SUM_SLACK
        kept = self.kept(limit_s)
        while kept and self._states(kept, 1) > most_states:
            kept = kept[:-1]
        window = (self.model.devices + 1) // 2
        while window > 1 and self._states(kept, window) > most_states:
            window -= 1 if window < 16 else window // 8
        if self._states(kept, window) * self.model.devices > MAX_TABLES:
            return None
        edges = self.edges(kept)
        lengths = edges.lengths(limit_s)[self._row]
        most, choice = self._balance(edges, window).choose(lengths)
        return self._plan(edges, choice, lengths) if most >= self.model.layers else None

    def _plan(self, edges: StageEdges, choice: list[int], lengths: Ints) -> Placement | None:
        placement = place_edges(self.model, edges, choice, lengths)
        return placement if placement is not None and self.model.is_allowed(placement) else None

    def exact_s(self, limit_s: float) -> float:
        """Seconds that ``holds`` will take, roughly and at most."""
        kept = self.kept(limit_s)
        count = self._states(kept, (self.model.devices + 1) // 2)
        if count > MANY_STATES:
            return math.inf
        p = self.run.period
        steps = (p + 1 + len(kept)) ** 2
        return count * (0.34 if p > 2 else 0.5) * self.model.devices * steps / STATES_PER_S

    def holds(self, limit_s: float) -> bool:
        """Whether the devices can hold all layers within the limit, the stages perhaps not connected: False
        is a proof."""
        limit_s *= 1 + EQUAL_SUMS / 5
        edges = self.edges(self.kept(limit_s))
        lengths = edges.lengths(limit_s)[self._row]
        return self._balance(edges, (self.model.devices + 1) // 2).most(lengths) >= self.model.layers

    def solve(self, limit_s: float, deadline: float) -> Placement | None:
        """A plan within the limit by CP-SAT, or None: there is none (proved).

        Raises:
            TimeoutError: undecided, or a plan only with less memory in flight than its places need.
        """
        limit_s *= 1 + EQUAL_SUMS / 5
        edges = self.edges(self.kept(limit_s))
        lengths = edges.lengths(limit_s)
        chosen = solve_balanced_edges(edges, lengths, self.reach.sizes.tolist(), deadline)
        if chosen is None:
            return None
        choice = [-1] * self.model.devices
        free = [list(group) for group in self.reach.members]
        for row, e in chosen:
            choice[free[row].pop()] = e
        placement = self._plan(edges, choice, lengths[self._row])
        if placement is None:
            raise TimeoutError
        return placement

    def refuted(self, limit_s: float) -> bool:
        """Whether prices prove that no plan keeps the limit."""
        limit_s *= 1 + EQUAL_SUMS / 5
        edges = self.edges(self.kept(limit_s))
        most, _ = potential_bound(edges, edges.lengths(limit_s), self.reach.sizes)
        return most < self.model.layers - LAYER_ROUNDING

    def witness(self, limit_s: float) -> Witness:
        """The potentials that bound what devices hold within the limit, as prices of the layers.

        Every position outside the run is a node here, for a price must hold for stages that end anywhere.
        """
        run = self.run
        edges = self.edges((*range(1, run.start), *range(run.stop + 1, self.model.layers)))
        _, potential = potential_bound(edges, edges.lengths(limit_s), self.reach.sizes)
        at = [
            potential[edges.node_of.get(position, (position - run.start) % run.period)]
            for position in range(self.model.layers + 1)
        ]
        return Witness(layer_prices=tuple(float(1 + a - b) for a, b in itertools.pairwise(at)))

    def bound(self, low_s: float, deadline: float) -> tuple[float, float]:
        """(the largest limit that prices refute, the least one that they do not), ``low_s`` being refuted.

        Infinite where they refute every limit; the second one is infinite where time is out.
        """
        limit_s, step = low_s, low_s * 0.01
        for _ in range(20):
            if time.perf_counter() > deadline:
                return low_s, math.inf
            limit_s, step = limit_s + step, step * 3
            if not self.refuted(limit_s):
                break
            low_s = limit_s
        else:
            return (math.inf, math.inf) if self.refuted(math.inf) else (low_s, math.inf)
        every = self.edges(self.kept(limit_s)).candidates(low_s, limit_s)
        low, high = -1, len(every)  # refuted at low, not at high
        while high - low > 1:
            if time.perf_counter() > deadline:
                return max(low_s, float(every[low]) if low >= 0 else 0.0), math.inf
            middle = (low + high) // 2
            if self.refuted(float(every[middle])):
                low = middle
            else:
                high = middle
        least = float(every[high]) if high < len(every) else limit_s
        return (least if self.refuted(least * (1 - EQUAL_SUMS)) else low_s), least

    def first(self, low_s: float, deadline: float) -> Placement | None:
        """Any plan, its slowest stage within a few times ``low_s`` if possible."""
        limit_s, step = low_s, low_s * 1e-3
        for _ in range(16):
            if time.perf_counter() > deadline:
                step = max(step, low_s / 4)
            limit_s, step = limit_s + step, step * 3
            placement = self.find(limit_s)
            if placement is not None:
                return placement
        return self.find(math.inf)

    def improve(self, best: Placement, low_s: float, deadline: float) -> Placement:
        """The least limit that ``find`` finds a plan for: binary search over what stages can take."""
        value = bottleneck_s(self.model, best)
        every = self.edges(self.kept(value)).candidates(low_s, value * (1 - EQUAL_SUMS))
        low, high = -1, len(every)  # nothing found at low, found at high
        while high - low > 1 and time.perf_counter() < deadline:
            middle = (low + high) // 2
            better = self.find(float(every[middle]))
            if better is None:
                low = middle
            else:
                high = middle
                if bottleneck_s(self.model, better) < value:
                    best, value = better, bottleneck_s(self.model, better)
        return best

    def prove(
        self, best: Placement | None, low_s: float, deadline: float
    ) -> tuple[Placement | None, float, BoundKind | None]:
        """Looks for better plans until none is left: (best plan, lower bound, what proves it).

        The bound is the best plan's value where that is proved, infinite where there is no plan at all, else
        ``low_s``, with no proof.
        """
        while True:
            value = math.inf if best is None else bottleneck_s(self.model, best)
            target = value * (1 - EQUAL_SUMS)
            left = deadline - time.perf_counter()
            if left <= 0:
                return best, low_s, None
            if self.exact_s(target) <= left:
                if not self.holds(target):
                    return best, value, BoundKind.EDGES
                better = self.find(target, MAX_TABLES // self.model.devices)
                if better is not None and bottleneck_s(self.model, better) < value:
                    best = better
                    continue
            try:
                better = self.solve(target, deadline)
            except TimeoutError:
                return best, low_s, None
            if better is None:
                return best, value, BoundKind.EDGES_BY_CP_SAT
            if bottleneck_s(self.model, better) >= value:
                return best, low_s, None
            best = better
