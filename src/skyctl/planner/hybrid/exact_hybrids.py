"""Every hybrid of few devices: sets of devices, shares, orders and cuts, by branch and bound.

A set of devices with a number of microbatches has a floor: the least that any of its pipelines needs by
itself, whatever the others do. A choice of disjoint sets with their shares is no faster than the largest of
its sets' floors, so choices are taken by that, the least first, until it reaches the best step found; in
each, pipelines are combined, those with the least floors first, and only whole combinations are summed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations

from skyctl.planner.cost_model import Placement, consecutive
from skyctl.planner.evaluation import step_lower_bound_s
from skyctl.planner.hybrid.hybrid_model import Draft, HybridModel
from skyctl.planner.rhythms import Step

MOST_PLAYS = 300_000
"""Pipelines, each with a number of microbatches, up to which all are looked at: some 20 s."""
MOST_CHOICES = 500_000
"""Choices of sets with their shares that are ranked, at most."""
MARGIN = 1e-12
CHECK_EVERY = 64

Choice = tuple[tuple[tuple[int, ...], int], ...]
"""Sets of devices, disjoint, each with its share of the microbatches."""


@dataclass(frozen=True)
class HybridSearch:
    """The best step found, and whether no hybrid is faster (``complete``; without a step: none fits)."""

    best: Step | None
    complete: bool
    method: str


class _OutOfTimeError(Exception):
    """The deadline has passed."""


def pipelines_of(devices: tuple[int, ...], layers: int) -> Iterator[Placement]:
    """Every order of the devices with every cut."""
    count = len(devices)
    for cuts in combinations(range(1, layers), count - 1):
        edges = (0, *cuts, layers)
        sizes = [edges[i + 1] - edges[i] for i in range(count)]
        for order in permutations(devices):
            yield consecutive(zip(order, sizes, strict=True))


def number_of_pipelines(devices: int, layers: int) -> int:
    """How many ``pipelines_of`` so many devices there are."""
    return math.factorial(devices) * math.comb(layers - 1, devices - 1)


def is_small(model: HybridModel) -> bool:
    """Whether every hybrid can be looked at in seconds."""
    n, m = model.devices, model.microbatches
    most = min(n - 1, model.layers)
    plays = sum(math.perm(n, k) * math.comb(model.layers - 1, k - 1) for k in range(1, most + 1))
    if plays * (m - 1) > MOST_PLAYS:
        return False
    # Stirling numbers: sets of devices, of which one more holds the unused ones
    parts = [[0] * (n + 2) for _ in range(n + 2)]
    parts[0][0] = 1
    for i in range(1, n + 2):
        for k in range(1, i + 1):
            parts[i][k] = parts[i - 1][k - 1] + k * parts[i - 1][k]
    choices = sum(parts[n + 1][k + 1] * math.comb(m - 1, k - 1) for k in range(2, min(n, m) + 1))
    return choices <= MOST_CHOICES


def search_exactly(model: HybridModel, start: Step | None, deadline: float) -> HybridSearch:
    """The best hybrid of few devices.

    Args:
        start: a step to begin with.
        deadline: when to take the best so far, in seconds of ``time.perf_counter``.
    """
    search = _ExactSearch(model, start, deadline)
    try:
        search.run()
    except _OutOfTimeError:
        return HybridSearch(search.best, False, f"{search.words}; out of time")
    return HybridSearch(search.best, True, search.words)


class _ExactSearch:
    def __init__(self, model: HybridModel, start: Step | None, deadline: float) -> None:
        self.model, self.best, self.deadline = model, start, deadline
        self.choices = self.combined = 0
        self._looked = 0
        self._pipelines: dict[tuple[tuple[int, ...], int], list[tuple[float, Placement]]] = {}

    @property
    def words(self) -> str:
        """The method, and how many pipelines and combinations it looked at."""
        return (
            f"branch and bound over hybrids: {self.model.plays} pipelines, {self.choices} choices of sets "
            f"and shares, {self.combined} combinations"
        )

    @property
    def _limit_s(self) -> float:
        return math.inf if self.best is None else self.best.iteration_s * (1 - MARGIN)

    def _check_time(self) -> None:
        self._looked += 1
        if self._looked % CHECK_EVERY == 0 and time.perf_counter() > self.deadline:
            raise _OutOfTimeError

    def run(self) -> None:
        """Looks at all choices that may be better than the best so far."""
        ranked = []
        for choice in self._all_choices():
            self._check_time()
            floors = [self._of_set(devices, share) for devices, share in choice]
            if all(floors):
                ranked.append((max(of_set[0][0] for of_set in floors), choice))
        ranked.sort()
        for floor_s, choice in ranked:
            if floor_s >= self._limit_s:
                return
            self.choices += 1
            self._combine(choice)

    def _all_choices(self) -> Iterator[Choice]:
        """Two disjoint sets of devices or more, with every way to share the microbatches."""
        most = min(self.model.microbatches, self.model.devices)

        def sets(device: int, parts: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
            if device == self.model.devices:
                if len(parts) > 1:
                    yield parts
                return
            yield from sets(device + 1, parts)
            for i, part in enumerate(parts):
                if len(part) < self.model.layers:
                    yield from sets(device + 1, (*parts[:i], (*part, device), *parts[i + 1 :]))
            if len(parts) < most:
                yield from sets(device + 1, (*parts, (device,)))

        for parts in sets(0, ()):
            for shares in shares_of(self.model.microbatches, len(parts)):
                yield tuple(zip(parts, shares, strict=True))

    def _of_set(self, devices: tuple[int, ...], share: int) -> list[tuple[float, Placement]]:
        """The set's pipelines that fit and may be part of a better plan, by their floors."""
        key = (devices, share)
        pipelines = self._pipelines.get(key)
        if pipelines is None:
            pipelines = []
            costs = self.model.costs(share)
            for placement in pipelines_of(devices, self.model.layers):
                self._check_time()
                if not costs.is_allowed(placement):
                    continue
                if step_lower_bound_s(costs, placement) >= self._limit_s:
                    continue
                play = self.model.play(placement, share)
                if play is not None and play.floor_s < self._limit_s:
                    pipelines.append((play.floor_s, placement))
            pipelines.sort()
            self._pipelines[key] = pipelines
        return pipelines

    def _combine(self, choice: Choice) -> None:
        shares = tuple(share for _, share in choice)
        options = [self._of_set(devices, share) for devices, share in choice]

        def extend(at: int, placed: tuple[Placement, ...]) -> None:
            if at == len(options):
                self._check_time()
                self.combined += 1
                better = self.model.step(Draft(placed, shares), self._limit_s)
                self.best = better or self.best
                return
            for floor_s, placement in options[at]:
                if floor_s >= self._limit_s:
                    return
                extend(at + 1, (*placed, placement))

        extend(0, ())


def shares_of(microbatches: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each of ``count`` pipelines one microbatch or more."""
    for cuts in combinations(range(1, microbatches), count - 1):
        edges = (0, *cuts, microbatches)
        yield tuple(edges[i + 1] - edges[i] for i in range(count))
