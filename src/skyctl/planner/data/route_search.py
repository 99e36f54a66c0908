"""Which devices hold the model where trees may be packed: sets by their bounds, the most promising first."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from skyctl.planner.data.data_placement import ReplicaGroup, best_of_groups, fitting_group, least_gain
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.data.set_bounds import cut_byte_s, set_bound_s
from skyctl.planner.data.set_search import (
    ROUNDING,
    Incumbent,
    SetSearch,
    few_sets,
    improve_greedily,
    neighbours,
)
from skyctl.planner.data.tree_layouts import PackedSet, pack_set
from skyctl.records.sync import RoutePrices

SET_S = 5.0
"""Seconds to pack the trees of one set, at most."""
MOST_NEAR = 12
"""Replicas up to which sets that are near the best one are packed, too."""


def search_routes(model: ReplicaCosts, deadline: float, *, prove: bool) -> SetSearch:
    """The best set in a ring, a star or packed trees (with the problem's ``sync`` "trees": in trees alone).

    Args:
        deadline: when to take the best so far, in seconds of ``time.perf_counter``.
        prove: go through all sets where they are few, and say what no plan can be faster than.
    """
    incumbent = Incumbent(model)
    improve_greedily(incumbent, deadline)
    if incumbent.best is None:
        return SetSearch(None, True, None, incumbent.sets)
    search = _RouteSearch(incumbent, deadline)
    search.improve_near_best()
    bound_s = incumbent.bound_s if prove else None
    if prove and not incumbent.is_proved and few_sets(incumbent):
        bound_s = max(incumbent.bound_s, search.improve_all())
    if model.problem.sync == "trees":
        search.keep_trees()
    best = incumbent.best
    assert best is not None
    complete = bound_s is not None and best.iteration_s <= bound_s * (1 + ROUNDING)
    prices = search.prices(best.replicas, bound_s if bound_s is not None else -math.inf)
    return SetSearch(best, complete, bound_s, incumbent.sets, prices, len(search.packed))


class _RouteSearch:
    """The best candidate so far, and the sets whose trees were packed."""

    def __init__(self, incumbent: Incumbent, deadline: float) -> None:
        self.incumbent, self.deadline = incumbent, deadline
        self.model = incumbent.model
        self.packed: dict[tuple[int, ...], PackedSet] = {}

    @property
    def _best_s(self) -> float:
        assert self.incumbent.best is not None
        return self.incumbent.best.iteration_s

    @property
    def _late(self) -> bool:
        return time.perf_counter() > self.deadline

    def _cut_bound_s(self, replicas: Sequence[int]) -> float:
        return set_bound_s(self.model, replicas, cut_byte_s(self.model, replicas))

    def _may_be_better(self, bound_s: float) -> bool:
        return bound_s < self._best_s * (1 - ROUNDING)

    def _pack(self, replicas: tuple[int, ...]) -> bool:
        """Looks at a set's trees; whether they are better than the best so far, whose place they take."""
        if len(replicas) < 2 or replicas in self.packed:
            return False
        until = min(self.deadline, time.perf_counter() + SET_S)
        packed = self.packed[replicas] = pack_set(self.model, replicas, until)
        assert self.incumbent.best is not None
        layout = self.incumbent.best.group.layout
        gain = ROUNDING if layout.trees else least_gain(self.model.problem)
        limit_s = self._best_s * (1 - gain)
        placed = best_of_groups(self._groups(packed), self.model.microbatches, limit_s)
        self.incumbent.best = placed or self.incumbent.best
        return placed is not None

    def _groups(self, packed: PackedSet) -> Iterator[ReplicaGroup]:
        groups = (fitting_group(self.model, layout) for layout in packed.layouts)
        return (group for group in groups if group is not None)

    def improve_near_best(self) -> None:
        """Packs the trees of the best set, of all devices, and of sets near the best one."""
        usable, most = self.incumbent.usable, self.model.microbatches
        fastest = sorted(usable, key=lambda d: self.incumbent.microbatch_s[d])[:most]
        assert self.incumbent.best is not None
        for replicas in (self.incumbent.best.replicas, tuple(sorted(fastest))):
            if len(replicas) > 1 and not self._late and self._may_be_better(self._cut_bound_s(replicas)):
                self._pack(replicas)
        improved = len(usable) <= MOST_NEAR
        while improved:
            improved = False
            for replicas in neighbours(self.incumbent, self.incumbent.best.replicas):
                if self._late:
                    return
                if len(replicas) > 1 and self._may_be_better(self._cut_bound_s(replicas)):
                    improved = self._pack(replicas) or improved

    def improve_all(self) -> float:
        """Goes through all sets, those with the least bound first; what no plan can be faster than."""
        usable, model = self.incumbent.usable, self.model
        most = min(len(usable), model.microbatches)
        sets = chain.from_iterable(combinations(usable, size) for size in range(2, most + 1))
        ranked = sorted((self._cut_bound_s(replicas), replicas) for replicas in sets)
        least_s = math.inf
        for bound_s, replicas in ranked:
            if not self._may_be_better(bound_s) or self._late:
                least_s = min(least_s, bound_s)
                break
            self.incumbent.improve(replicas)
            if self._may_be_better(bound_s):
                self._pack(replicas)
                least_s = min(least_s, set_bound_s(model, replicas, self._byte_s(replicas)))
            else:
                least_s = min(least_s, bound_s)
        return min(least_s, self._best_s)

    def _byte_s(self, replicas: tuple[int, ...]) -> float:
        return max(self.packed[replicas].byte_s, cut_byte_s(self.model, replicas))

    def keep_trees(self) -> None:
        """Puts the best set's trees in the place of its ring or star."""
        best = self.incumbent.best
        assert best is not None
        if len(best.replicas) == 1 or best.group.layout.trees:
            return
        if best.replicas not in self.packed:
            self.packed[best.replicas] = pack_set(self.model, best.replicas, self.deadline)
        groups = self._groups(self.packed[best.replicas])
        self.incumbent.best = best_of_groups(groups, self.model.microbatches) or best

    def prices(self, replicas: tuple[int, ...], bound_s: float) -> tuple[RoutePrices, ...]:
        """Of the sets without which the bound is not proved, and of these replicas."""
        return tuple(
            packed.prices
            for chosen, packed in sorted(self.packed.items())
            if packed.prices is not None and (chosen == replicas or self._cut_bound_s(chosen) < bound_s)
        )
