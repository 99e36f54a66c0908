"""Objective ``bottleneck`` where layers repeat: exact for dozens of different devices, good plans for many.

Whether a limit holds is a choice of one edge a device (``repeats.py``). Prices of the nodes refute limits
(``potentials.py``), dynamic programming over the imbalance of the phases in a narrow window finds plans
(``balance.py``). Where these two do not meet, the full window decides, and CP-SAT where that is too wide or
the edges found do not connect. Memory that depends on a stage's place is bounded by the least in flight, and
a plan found is checked with the true numbers.
"""

from __future__ import annotations

import math
import time

import numpy as np

from skyctl.planner.bottleneck.balance import Balance, states
from skyctl.planner.bottleneck.potentials import ROUNDING, most_layers
from skyctl.planner.bottleneck.reach import SLACK, Ints, Reach
from skyctl.planner.bottleneck.repeats import Edges, Run, needless
from skyctl.planner.bottleneck.trail import laid_out
from skyctl.planner.evaluate import bottleneck_s
from skyctl.planner.model import Model, Piece
from skyctl.planner.solver import balanced_edges

Pieces = tuple[Piece, ...]

FEW_STATES = 4_096
MANY_STATES = 1 << 25
MAX_TABLES = 1 << 26
STATES_PER_S = 2e8
"""Device by edge by state: slower than any machine that runs this, so that a proof begun is finished."""
MARGIN = 5e-10
"""A plan better by less than this, relative, counts as equal: sums of equal layers round differently."""


class Periodic:
    """The question whether a limit holds, and the search for the least one."""

    def __init__(self, model: Model, reach: Reach, run: Run) -> None:
        self.model, self.reach, self.run = model, reach, run
        self._edges: dict[tuple[int, ...], Edges] = {}
        self._row = np.empty(model.devices, dtype=np.int64)
        for row, group in enumerate(reach.members):
            self._row[group] = row

    def edges(self, kept: tuple[int, ...]) -> Edges:
        """The edges between these nodes."""
        known = self._edges.get(kept)
        if known is None:
            known = self._edges[kept] = Edges(self.model, self.reach, self.run, kept)
        return known

    def kept(self, limit_s: float) -> tuple[int, ...]:
        """The positions outside the run at which a plan within the limit may need to cut."""
        outside = {*range(1, self.run.start), *range(self.run.stop + 1, self.model.layers)}
        return tuple(sorted(outside - needless(self.reach, self.run, limit_s)))

    def _balance(self, edges: Edges, window: int) -> Balance:
        nodes = self.run.period + len(edges.places)
        return Balance(edges.edges, self.run.period, nodes, edges.source, edges.sink, window)

    def _states(self, kept: tuple[int, ...], window: int) -> int:
        p = self.run.period
        return states(p, p + 2 + len(kept), window)

    def find(self, limit_s: float, most_states: int = FEW_STATES) -> Pieces | None:
        """A plan within the limit (but for rounding), or None: none was found."""
        limit_s *= 1 + SLACK
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

    def _plan(self, edges: Edges, choice: list[int], lengths: Ints) -> Pieces | None:
        pieces = laid_out(self.model, edges, choice, lengths)
        return pieces if pieces is not None and self.model.allowed(pieces) else None

    def exact_s(self, limit_s: float) -> float:
        """About how long ``holds`` will take, at most."""
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
        limit_s *= 1 + MARGIN / 5
        edges = self.edges(self.kept(limit_s))
        lengths = edges.lengths(limit_s)[self._row]
        return self._balance(edges, (self.model.devices + 1) // 2).most(lengths) >= self.model.layers

    def solve(self, limit_s: float, deadline: float) -> Pieces | None:
        """A plan within the limit by CP-SAT, or None: there is none (proved).

        Raises:
            TimeoutError: undecided, or a plan only with less memory in flight than its places need.
        """
        limit_s *= 1 + MARGIN / 5
        edges = self.edges(self.kept(limit_s))
        lengths = edges.lengths(limit_s)
        chosen = balanced_edges(edges, lengths, self.reach.sizes.tolist(), deadline)
        if chosen is None:
            return None
        choice = [-1] * self.model.devices
        free = [list(group) for group in self.reach.members]
        for row, e in chosen:
            choice[free[row].pop()] = e
        pieces = self._plan(edges, choice, lengths[self._row])
        if pieces is None:
            raise TimeoutError
        return pieces

    def refuted(self, limit_s: float) -> bool:
        """Whether prices prove that no plan keeps the limit."""
        limit_s *= 1 + MARGIN / 5
        edges = self.edges(self.kept(limit_s))
        most = most_layers(edges, edges.lengths(limit_s), self.reach.sizes)
        return most < self.model.layers - ROUNDING

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
        return (least if self.refuted(least * (1 - MARGIN)) else low_s), least

    def first(self, low_s: float, deadline: float) -> Pieces | None:
        """Any plan, within a few times ``low_s`` if it can be."""
        limit_s, step = low_s, low_s * 1e-3
        for _ in range(16):
            if time.perf_counter() > deadline:
                step = max(step, low_s / 4)
            limit_s, step = limit_s + step, step * 3
            pieces = self.find(limit_s)
            if pieces is not None:
                return pieces
        return self.find(math.inf)

    def improve(self, best: Pieces, low_s: float, deadline: float) -> Pieces:
        """The least limit that ``find`` finds a plan for: binary search over what stages can take."""
        value = bottleneck_s(self.model, best)
        every = self.edges(self.kept(value)).candidates(low_s, value * (1 - MARGIN))
        low, high = -1, len(every)  # nothing found at low, found at high
        while high - low > 1 and time.perf_counter() < deadline:
            middle = (low + high) // 2
            found = self.find(float(every[middle]))
            if found is None:
                low = middle
            else:
                high = middle
                if bottleneck_s(self.model, found) < value:
                    best, value = found, bottleneck_s(self.model, found)
        return best

    def prove(self, best: Pieces | None, low_s: float, deadline: float) -> tuple[Pieces | None, float, str]:
        """(best plan, lower bound, how): is anything better than ``best``? Asked again until nothing is.

        The bound is the best's value where that is proved, infinite where there is no plan at all, else
        ``low_s``, and how is empty.
        """
        while True:
            value = math.inf if best is None else bottleneck_s(self.model, best)
            target = value * (1 - MARGIN)
            left = deadline - time.perf_counter()
            if left <= 0:
                return best, low_s, ""
            if self.exact_s(target) <= left:
                if not self.holds(target):
                    return best, value, "periodic edges (exact)"
                better = self.find(target, MAX_TABLES // self.model.devices)
                if better is not None and bottleneck_s(self.model, better) < value:
                    best = better
                    continue
            try:
                better = self.solve(target, deadline)
            except TimeoutError:
                return best, low_s, ""
            if better is None:
                return best, value, "periodic edges (exact, CP-SAT)"
            if bottleneck_s(self.model, better) >= value:
                return best, low_s, ""
            best = better
