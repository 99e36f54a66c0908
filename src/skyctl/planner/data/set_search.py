"""Which devices hold the model: every set of them where they are few, else greedy sets, and a lower bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from skyctl.planner.data.data_placement import DataPlacement, best_of_set, fitting_group, may_miss_ring
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.data.set_bounds import least_byte_s
from skyctl.planner.routes.route_layouts import Layout
from skyctl.planner.sum_costs import message_factor
from skyctl.records.sync import RoutePrices
from skyctl.schedule.batch_shares import best_shares, level_in_parts_s

ROUNDING = 1e-12
MOST_PREFIXES = 24
"""Sets that are looked at for each root of a star, about."""
MOST_SETS = 5_000
"""Sets of devices up to which all are looked at: 12 devices have 4095."""


@dataclass(frozen=True)
class SetSearch:
    """The result of a search over sets. ``best`` None: no device has the memory.

    ``complete``: every set was looked at or ruled out; else ``bound_s`` is what no plan can be faster than.
    ``prices``: of the sets whose trees were packed, where the bound needs them, and of the best one.
    ``packed``: how many sets' trees were.
    """

    best: DataPlacement | None
    complete: bool
    bound_s: float | None
    sets: int
    prices: tuple[RoutePrices, ...] = ()
    packed: int = 0


def best_alone(model: ReplicaCosts) -> DataPlacement | None:
    """The fastest of the devices that can hold all layers, alone; None: none can."""
    best, below_s = None, math.inf
    for d in range(len(model.ids)):
        placed = best_of_set(model, (d,), below_s)
        if placed is not None:
            best, below_s = placed, placed.iteration_s
    return best


class Incumbent:
    """The best candidate so far. Sets that can't be better are left out before their layouts are looked at.

    Attributes:
        best: None where no device can hold all layers.
        usable: the devices that can.
        extra_s: by usable device, what a step takes there at least besides microbatches (``least_extras_s``).
        overlapped_s: by usable device, with a delay what any sum takes that it has a part in; else 0.
        bound_s: what no plan can be faster than.
    """

    def __init__(self, model: ReplicaCosts) -> None:
        self.model = model
        costs = {d: model.fitting_cost(d) for d in range(len(model.ids))}
        self.microbatch_s = {d: cost.microbatch_s for d, cost in costs.items() if cost is not None}
        self.usable = list(self.microbatch_s)
        self.extra_s, self.overlapped_s = least_extras_s(model, self.usable)
        self.best = best_alone(model)
        self.bound_s = _lower_bound_s(self)
        self._seen: set[tuple[int, ...]] = {(d,) for d in self.usable}

    @property
    def sets(self) -> int:
        """How many sets were looked at."""
        return len(self._seen)

    @property
    def is_proved(self) -> bool:
        """Whether nothing can be better by more than rounding."""
        return self.best is None or self.best.iteration_s <= self.bound_s * (1 + ROUNDING)

    def improve(self, replicas: tuple[int, ...]) -> bool:
        """Looks at a set of two or more; whether it holds a better candidate, which is kept."""
        if replicas in self._seen or self.best is None:
            return False
        self._seen.add(replicas)
        times = [self.microbatch_s[d] for d in replicas]
        extras = [self.extra_s[d] for d in replicas]
        least_s = level_in_parts_s(self.model.microbatches, extras, times)
        if max(least_s, *(self.overlapped_s[d] for d in replicas)) >= self.best.iteration_s:
            return False
        better = best_of_set(self.model, replicas, self.best.iteration_s)
        self.best = better or self.best
        return better is not None

    def improve_star(self, replicas: tuple[int, ...], root: int) -> None:
        """Looks at a star of the replicas that get a microbatch there if nobody needs to have one."""
        group = fitting_group(self.model, Layout(replicas, root))
        if group is None or self.best is None:
            return
        shares = best_shares(self.model.microbatches, group.extra_s, group.microbatch_s, least=0)
        kept = tuple(d for d, m in zip(replicas, shares, strict=True) if m or d == root)
        if len(kept) < 2:
            return
        group = fitting_group(self.model, Layout(kept, root))
        assert group is not None  # as all of them had the memory
        self.best = group.best_placement(self.model.microbatches, self.best.iteration_s) or self.best


def search_greedy(model: ReplicaCosts, deadline: float) -> SetSearch:
    """The best of sets that grow in a few orders, and around each root, improved by one device at a time.

    ``deadline``: when to take the best so far, in seconds of ``time.perf_counter``.
    """
    incumbent = Incumbent(model)
    improve_greedily(incumbent, deadline)
    return SetSearch(incumbent.best, incumbent.best is None, None, incumbent.sets)


def improve_greedily(incumbent: Incumbent, deadline: float) -> None:
    """Looks at growing sets, at growing stars, and at what is near the best one, in rings and stars."""
    for replicas in _growing(incumbent):
        incumbent.improve(replicas)
        if incumbent.is_proved or time.perf_counter() > deadline:
            return
    stars = () if incumbent.model.problem.sync == "ring" else _growing_stars(incumbent)
    for replicas, root in stars:
        incumbent.improve_star(replicas, root)
        if incumbent.is_proved or time.perf_counter() > deadline:
            return
    improved = incumbent.best is not None
    while improved and incumbent.best is not None:
        improved = False
        for replicas in neighbours(incumbent, incumbent.best.replicas):
            improved = incumbent.improve(replicas) or improved
            if incumbent.is_proved or time.perf_counter() > deadline:
                return


def search_all(model: ReplicaCosts, deadline: float) -> SetSearch:
    """The best of all sets where they are few and there is time; else the greedy one, with a lower bound.

    In a ring, or in stars; where trees may be packed, ``route_search``.
    """
    incumbent = Incumbent(model)
    improve_greedily(incumbent, deadline)
    if incumbent.best is None:
        return SetSearch(None, True, None, incumbent.sets)
    if incumbent.is_proved:
        return SetSearch(incumbent.best, False, incumbent.bound_s, incumbent.sets)
    usable = incumbent.usable
    most = min(len(usable), model.microbatches)
    complete = few_sets(incumbent)
    if complete:
        for replicas in chain.from_iterable(combinations(usable, size) for size in range(2, most + 1)):
            incumbent.improve(replicas)
            if time.perf_counter() > deadline or may_miss_ring(model, replicas, incumbent.best.iteration_s):
                complete = False
                break
    if complete:
        return SetSearch(incumbent.best, True, incumbent.best.iteration_s, incumbent.sets)
    return SetSearch(incumbent.best, False, incumbent.bound_s, incumbent.sets)


def few_sets(incumbent: Incumbent) -> bool:
    """Whether all sets of the usable devices can be gone through."""
    usable = len(incumbent.usable)
    most = min(usable, incumbent.model.microbatches)
    return sum(math.comb(usable, size) for size in range(1, most + 1)) <= MOST_SETS


def _growing(incumbent: Incumbent) -> Iterator[tuple[int, ...]]:
    """Sets of the first 2, 3, … devices in three orders: fast, with a fast line, with little of both."""
    times = incumbent.microbatch_s
    extra_s = {d: incumbent.extra_s[d] + incumbent.overlapped_s[d] for d in incumbent.usable}
    keys: tuple[Callable[[int], float], ...] = (
        times.__getitem__,
        extra_s.__getitem__,
        lambda d: times[d] + extra_s[d],
    )
    for key in keys:
        order = sorted(incumbent.usable, key=lambda d: (key(d), d))
        for count in range(2, min(len(order), incumbent.model.microbatches) + 1):
            yield tuple(sorted(order[:count]))


def _growing_stars(incumbent: Incumbent) -> Iterator[tuple[tuple[int, ...], int]]:
    """By root, the devices with the fastest lines to and from it: 2, 3, … of them, or in larger steps.

    With ``server`` roots are helpers, too.
    """
    model, usable = incumbent.model, incumbent.usable
    step = max(1, len(usable) // MOST_PREFIXES)
    helpers = model.helpers_of(()) if model.problem.sync == "server" else ()
    roots = [(d, True) for d in usable] + [(d, False) for d in helpers]
    for root, holds in roots if model.microbatches > 1 else ():

        def line_s(d: int, root: int = root) -> float:
            return max(model.line_byte_s(d, root), model.line_byte_s(root, d))

        order = sorted((d for d in usable if d != root), key=lambda d: (line_s(d), d))
        for count in range(1, len(order) + step, step):
            yield tuple(sorted((*([root] if holds else []), *order[:count]))), root


def neighbours(incumbent: Incumbent, replicas: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The sets of two or more with one device more, one less, or another one in place of one."""
    others = [d for d in incumbent.usable if d not in replicas]
    if len(replicas) < incumbent.model.microbatches:
        for d in others:
            yield tuple(sorted((*replicas, d)))
    if len(replicas) > 1:
        for d in replicas:
            rest = tuple(x for x in replicas if x != d)
            if len(rest) > 1:
                yield rest
            for other in others:
                yield tuple(sorted((*rest, other)))


def least_extras_s(model: ReplicaCosts, usable: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
    """By usable device, the least seconds of a step besides its microbatches, in any set of two or more.

    Latency, its own optimizer, and its processor's part come to what its lines take (``least_byte_s``). With
    a delay its lines and latency are given second, beside which it computes; without one that is 0.
    """
    out, beside = {}, dict.fromkeys(usable, 0.0)
    helpers = [] if len(usable) < 2 else [d for d in model.any_helpers() if d not in usable]
    for d in usable:
        others = [other for other in (*usable, *helpers) if other != d]
        cost = model.fitting_cost(d)
        assert cost is not None
        if not others:
            out[d] = math.inf
            continue
        byte_s = least_byte_s(model, d, others)
        latency_s = float(model.latency_table[d, others].min() + model.latency_table[others, d].min())
        factor = message_factor(model.problem, byte_s)
        passed_s = 2 * factor * model.problem.devices[d].message_byte_s * model.total_bytes
        if model.problem.rhythm.delay:
            out[d], beside[d] = passed_s + cost.optimizer_s, byte_s * model.total_bytes + latency_s
        else:
            out[d] = max(cost.exposure.unhidden_s(byte_s), passed_s) + latency_s + cost.optimizer_s
    return out, beside


def _lower_bound_s(incumbent: Incumbent) -> float:
    """The seconds that no plan is below: the fastest device alone (the best so far), or the level of all.

    At that level, which leaves each device its own least extras and nothing of the others', as many
    microbatches are computed as the step has.
    """
    alone_s = math.inf if incumbent.best is None else incumbent.best.iteration_s
    if len(incumbent.usable) < 2:
        return alone_s
    # those that take part have no longer sums than the slowest of them, so the quickest of them at least do
    overlapped_s = incumbent.overlapped_s
    order = sorted(incumbent.usable, key=overlapped_s.__getitem__)
    return min(
        alone_s,
        *(
            max(sum_s, _level_s(incumbent, [d for d in order if overlapped_s[d] <= sum_s]))
            for sum_s in sorted(set(overlapped_s.values()))
        ),
    )


def _level_s(incumbent: Incumbent, devices: Sequence[int]) -> float:
    """The least step in which these compute all microbatches, each with its own least extras."""
    times = [incumbent.microbatch_s[d] for d in devices]
    extras = [incumbent.extra_s[d] for d in devices]
    shares = best_shares(incumbent.model.microbatches, extras, times, least=0)
    return max(m * t + e for m, t, e in zip(shares, times, extras, strict=True) if m)
