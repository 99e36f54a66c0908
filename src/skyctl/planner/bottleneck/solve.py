"""Objective ``bottleneck``: the method that fits the problem, exact where one is.

Few kinds of devices: all subsets. Layers that repeat: edges between phases. Else: prices bound, beams find,
CP-SAT decides what is left if the problem is small enough. What is not proved by the deadline is bounded.
"""

from __future__ import annotations

import math
import time

from skyctl.planner.bottleneck import beam, subsets
from skyctl.planner.bottleneck.cover import Covering
from skyctl.planner.bottleneck.narrow import narrow
from skyctl.planner.bottleneck.periodic import MARGIN, Periodic
from skyctl.planner.bottleneck.prices import Prices, price_bound_s, volume_bound_s
from skyctl.planner.bottleneck.reach import Reach
from skyctl.planner.bottleneck.repeats import find_run
from skyctl.planner.evaluate import bottleneck_s
from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]
Answer = tuple["Pieces | None", float, bool, str]

FEW_SUBSETS = 1 << 12
EQUAL = 1e-9
"""Relative, how near a bound is to a plan's value that it proves."""
BELOW = 2e-6
"""Relative, how far below the largest limit that prices refute a bound is claimed: room for other prices."""


def least_bottleneck(model: Model, start: Pieces | None, deadline: float) -> Answer:
    """(best plan, valid lower bound on any plan's largest stage, proved, method); links and order in time
    are ignored, memory and pins are not.

    ``start``: a plan to begin with. No plan and proved: there is none (the bound is then infinite).
    """
    reach = Reach(model)
    low = volume_bound_s(reach)
    if subsets.can(model, FEW_SUBSETS):
        return _by_subsets(model, start, low, deadline)
    search = Search(reach, start, low, deadline)
    run = find_run(model, reach)
    if run is not None:
        search.by_periods(Periodic(model, reach, run))
    if not search.proved and subsets.can(model):
        return _by_subsets(model, search.best, search.low, deadline)
    if not search.proved:
        search.in_general()
    return search.best, search.bound_s, search.proved, search.method


def _by_subsets(model: Model, start: Pieces | None, low_s: float, deadline: float) -> Answer:
    best, bound, proved = narrow(
        model, start, lambda limit_s, strict: subsets.cover(model, limit_s, strict=strict), low_s, deadline
    )
    return best, bound, proved, "bisection over all subsets of devices"


class Search:
    """The best plan and the best bound so far. ``low``: no plan keeps less (what is claimed: ``bound_s``)."""

    def __init__(self, reach: Reach, best: Pieces | None, low_s: float, deadline: float) -> None:
        self.model, self.reach, self.deadline = reach.model, reach, deadline
        self.best = best
        self.low = low_s
        self.proved = False
        self.bound_by = "volume"
        self.found_by = "" if best is None else "heuristic"

    @property
    def method(self) -> str:
        """What was used, in words."""
        return f"plan: {self.found_by or 'none'}; bound: {self.bound_by}"

    @property
    def bound_s(self) -> float:
        """The best's value where that is proved; else what whoever re-proves it by other prices can reach."""
        return self.low if self.proved or "prices" not in self.bound_by else self.low * (1 - BELOW)

    def _value_s(self) -> float:
        return math.inf if self.best is None else bottleneck_s(self.model, self.best)

    def _left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def _take(self, pieces: Pieces | None, by: str) -> None:
        """A plan; where it meets the bound, it is proved."""
        if pieces is not None and (self.best is None or bottleneck_s(self.model, pieces) < self._value_s()):
            self.best, self.found_by = pieces, by
            self._prove(self.low, self.bound_by)

    def _prove(self, bound: float, by: str) -> None:
        """A bound; where it meets the best value, that is proved."""
        if bound >= self._value_s() * (1 - EQUAL):
            self.low, self.proved, self.bound_by = self._value_s(), True, by
        elif bound > self.low:
            self.low, self.bound_by = bound, by

    def by_periods(self, periodic: Periodic) -> None:
        """Repeated layers: prices of the nodes and the narrow window, then the exact methods between them."""
        low, least = periodic.bound(self.low, self.deadline)
        self._prove(low, "prices")
        if self.proved:
            return
        found = None if math.isinf(least) else periodic.find(least)
        if found is None:
            found = periodic.first(self.low, self.deadline)
        self._take(found, "periodic edges")
        if self.proved:
            return
        if self.best is not None and self._left_s() > 0:
            self._take(periodic.improve(self.best, self.low, self.deadline), "periodic edges")
        stop = time.perf_counter() + 0.2 * self._left_s()
        self._take(beam.search(Prices(self.reach), self.best, self.low, stop, beam.WIDTHS[:3]), "beam")
        if self.proved:
            return
        stop = time.perf_counter() + 0.5 * self._left_s()
        best, bound, how = periodic.prove(self.best, self.low, stop)
        self._take(best, "periodic edges")
        if how:
            self._prove(bound, how)

    def in_general(self) -> None:
        """Any layers: prices, then beams, then CP-SAT for what is left."""
        prices = Prices(self.reach)
        if self.best is None:
            self._take(beam.first(prices, self.low, self.deadline), "beam")
        now = time.perf_counter()
        self._prove(*price_bound_s(prices, self.low, self._value_s(), now + 0.4 * self._left_s()))
        small = Covering.can(self.reach)
        if not self.proved and self._left_s() > 0:
            stop = time.perf_counter() + (0.4 if small else 1.0) * self._left_s()
            self._take(beam.search(prices, self.best, self.low, stop), "beam")
        if self.best is not None and not self.proved and prices.refute(self._value_s() * (1 - MARGIN)):
            self._prove(self._value_s(), "prices")
        if self.proved or not small or self._left_s() <= 0:
            return
        cover = Covering(self.reach, self.deadline).cover
        best, bound, _ = narrow(self.model, self.best, cover, self.low, self.deadline)
        self._take(best, "CP-SAT")
        self._prove(bound, "CP-SAT")
