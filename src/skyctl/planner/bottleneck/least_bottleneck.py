"""Objective ``bottleneck``: the method that fits the problem, exact where one is.

Few groups of devices: all subsets. Layers that repeat: edges between phases. Else: prices bound, beams find,
CP-SAT decides what is left if the problem is small enough. Without a proof by the
deadline, the plan has a bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from skyctl.planner.bottleneck import device_subsets, priced_beam
from skyctl.planner.bottleneck.cp_sat import IntervalSolver, solve_covering
from skyctl.planner.bottleneck.layer_prices import LayerPrices, price_bound_s, volume_bound_s
from skyctl.planner.bottleneck.periodic_search import EQUAL_SUMS, PeriodicSearch
from skyctl.planner.bottleneck.reach_table import ReachTable
from skyctl.planner.bottleneck.repeated_layers import find_run
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.evaluation import BoundKind, bottleneck_s
from skyctl.records.plan import Witness

FEW_SUBSETS = 1 << 12
EQUAL = 1e-9
"""Relative, how near a bound is to a plan's value that it proves."""
PRICE_MARGIN = 2e-6
"""Relative, how far below the largest limit that prices refute a bound is claimed: room for other prices."""
MAX_COVERING_CELLS = 8_000

CoverSearch = Callable[[float, bool], "Placement | None"]
"""(limit, strict) → a plan within it, or None: there is none (proved). TimeoutError when undecided."""


class BottleneckResult(NamedTuple):
    """The best plan and a valid lower bound on any plan's slowest stage.

    No plan and ``proved``: there is none (the bound is then infinite). ``method``: how, in words.
    ``witness``: prices that prove the bound, where prices do.
    """

    placement: Placement | None
    bound_s: float
    proved: bool
    method: str
    witness: Witness | None = None


def bisect_limit(
    model: CostModel, best: Placement | None, cover: CoverSearch, low: float, deadline: float
) -> tuple[Placement | None, float, bool]:
    """Bisects the limit, then proves that nothing is strictly below the best: (plan, bound, proved).

    Args:
        best: a plan to begin with; None, and none found without a limit: nothing fits (bound infinite).
        low: a valid bound to begin with.
    """
    try:
        if best is None:
            best = cover(math.inf, False)
            if best is None:
                return None, math.inf, True
        while True:
            value = bottleneck_s(model, best)
            if value - low <= 1e-6 * value:
                target, strict = value, True
            else:
                target, strict = (low + value) / 2, False
            if time.perf_counter() > deadline:
                return best, low, False
            better = cover(target, strict)
            if better is not None:
                best = better
            elif strict:
                return best, value, True
            else:
                low = target
    except TimeoutError:
        return best, low, False


class CoveringModel:
    """CP-SAT's answer whether there is a plan within a limit.

    First a small model, a path of largest ranges; where memory rules its plan out, stages as intervals.
    """

    def __init__(self, reach: ReachTable, deadline: float) -> None:
        self.reach, self.deadline = reach, deadline
        self._solver = IntervalSolver(reach.model, deadline)

    @staticmethod
    def is_small(reach: ReachTable) -> bool:
        """Whether the models stay small enough to be of use."""
        return len(reach.members) * reach.layers <= MAX_COVERING_CELLS

    def cover(self, limit_s: float, strict: bool) -> Placement | None:
        """A plan within the limit, or None: there is none (proved); see ``CoverSearch``."""
        reach = self.reach
        within = limit_s * (1 - EQUAL_SUMS) if strict else limit_s
        far = reach.far(within, reach.in_flight)
        ranges = solve_covering(reach.layers, far, reach.sizes.tolist(), self.deadline)
        if ranges is None:
            return None
        placement = self._without_overlaps(ranges)
        if reach.model.is_allowed(placement):
            return placement
        return self._solver.cover(limit_s, strict)

    def _without_overlaps(self, ranges: list[tuple[int, int, int]]) -> Placement:
        """As few of the ranges as cover all layers, each cut off where the one before ends."""
        free = [list(group) for group in self.reach.members]
        stages = []
        at = 0
        while at < self.reach.layers:
            row, _, stop = max((x for x in ranges if x[1] <= at), key=lambda x: x[2])
            stages.append(StageAssignment(free[row].pop(0), at, stop))
            at = stop
        return tuple(stages)


def least_bottleneck(model: CostModel, start: Placement | None, deadline: float) -> BottleneckResult:
    """The plan with the least slowest stage, and a bound; links and order are ignored, memory and pins not.

    ``start``: a plan to begin with.
    """
    reach = ReachTable(model)
    low = volume_bound_s(reach)
    if device_subsets.subsets_are_few(model, FEW_SUBSETS):
        return _by_subsets(model, start, low, deadline)
    search = BottleneckSearch(reach, start, low, deadline)
    run = find_run(model, reach)
    periodic = None if run is None else PeriodicSearch(model, reach, run)
    if periodic is not None:
        search.by_periods(periodic)
    if not search.proved and device_subsets.subsets_are_few(model):
        return _by_subsets(model, search.best, search.low, deadline)
    if not search.proved:
        search.in_general()
    witness = _find_witness(search, periodic)
    return BottleneckResult(search.best, search.bound_s, search.proved, search.method, witness)


def _find_witness(search: BottleneckSearch, periodic: PeriodicSearch | None) -> Witness | None:
    """Prices that prove the bound: those found for layers and places, else those of repeated layers."""
    if search.bound_by not in (BoundKind.VOLUME, BoundKind.PRICES, BoundKind.PRICES_BY_PLACE):
        return None
    limit_s = search.bound_s * (1 - EQUAL_SUMS)
    if not 0 < limit_s < math.inf:
        return None
    witness = (search.prices or LayerPrices(search.reach)).witness(limit_s)
    if witness is None and periodic is not None:
        witness = periodic.witness(limit_s)
    return witness


def _by_subsets(model: CostModel, start: Placement | None, low_s: float, deadline: float) -> BottleneckResult:
    best, bound, proved = bisect_limit(
        model,
        start,
        lambda limit_s, strict: device_subsets.placement_within(
            model, limit_s, strict=strict, deadline=deadline
        ),
        low_s,
        deadline,
    )
    return BottleneckResult(best, bound, proved, "bisection over all subsets of devices")


class BottleneckSearch:
    """The best plan and the best bound so far.

    ``low``: no plan's slowest stage takes less; what is claimed is ``bound_s``.
    """

    def __init__(self, reach: ReachTable, best: Placement | None, low_s: float, deadline: float) -> None:
        self.model, self.reach, self.deadline = reach.model, reach, deadline
        self.best = best
        self.low = low_s
        self.proved = False
        self.bound_by = BoundKind.VOLUME
        self.plan_from = "" if best is None else "heuristic"
        self.prices: LayerPrices | None = None

    @property
    def method(self) -> str:
        """How the plan and the bound were found, in words."""
        return f"plan: {self.plan_from or 'none'}; bound: {self.bound_by.value}"

    @property
    def bound_s(self) -> float:
        """The best plan's value where that is proved; else what can be proved again with other prices."""
        return self.low if self.proved or not self.bound_by.by_prices else self.low * (1 - PRICE_MARGIN)

    def _value_s(self) -> float:
        return math.inf if self.best is None else bottleneck_s(self.model, self.best)

    def _left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def _take(self, placement: Placement | None, by: str) -> None:
        """Takes a plan if it is better; where it meets the bound, it is proved."""
        if placement is not None and bottleneck_s(self.model, placement) < self._value_s():
            self.best, self.plan_from = placement, by
            self._prove(self.low, self.bound_by)

    def _prove(self, bound: float, by: BoundKind) -> None:
        """Takes a bound if it is better; where it meets the best plan's value, that is proved."""
        if bound >= self._value_s() * (1 - EQUAL):
            self.low, self.proved, self.bound_by = self._value_s(), True, by
        elif bound > self.low:
            self.low, self.bound_by = bound, by

    def by_periods(self, periodic: PeriodicSearch) -> None:
        """Repeated layers: prices of the nodes and the narrow window, then the exact methods between them."""
        low, least = periodic.bound(self.low, self.deadline)
        self._prove(low, BoundKind.PRICES)
        if self.proved:
            return
        placement = None if math.isinf(least) else periodic.find(least)
        if placement is None:
            placement = periodic.first(self.low, self.deadline)
        self._take(placement, "periodic edges")
        if self.proved:
            return
        if self.best is not None and self._left_s() > 0:
            self._take(periodic.improve(self.best, self.low, self.deadline), "periodic edges")
        stop = time.perf_counter() + 0.2 * self._left_s()
        self._take(
            priced_beam.search_beams(
                LayerPrices(self.reach), self.best, self.low, stop, priced_beam.WIDTHS[:3]
            ),
            "beam",
        )
        if self.proved:
            return
        stop = time.perf_counter() + 0.5 * self._left_s()
        best, bound, how = periodic.prove(self.best, self.low, stop)
        self._take(best, "periodic edges")
        if how:
            self._prove(bound, how)

    def in_general(self) -> None:
        """Any layers: prices, then beams, then CP-SAT for what is left."""
        prices = self.prices = LayerPrices(self.reach)
        if self.best is None:
            self._take(priced_beam.first_placement(prices, self.low, self.deadline), "beam")
        now = time.perf_counter()
        self._prove(*price_bound_s(prices, self.low, self._value_s(), now + 0.4 * self._left_s()))
        small = CoveringModel.is_small(self.reach)
        if not self.proved and self._left_s() > 0:
            stop = time.perf_counter() + (0.4 if small else 1.0) * self._left_s()
            self._take(priced_beam.search_beams(prices, self.best, self.low, stop), "beam")
        if self.best is not None and not self.proved and prices.refute(self._value_s() * (1 - EQUAL_SUMS)):
            self._prove(self._value_s(), BoundKind.PRICES)
        if self.proved or not small or self._left_s() <= 0:
            return
        cover = CoveringModel(self.reach, self.deadline).cover
        best, bound, _ = bisect_limit(self.model, self.best, cover, self.low, self.deadline)
        self._take(best, "CP-SAT")
        self._prove(bound, BoundKind.CP_SAT)
