"""Simulated annealing over orders of devices and their numbers of layers, many chains at once.

Kirkpatrick, Gelatt and Vecchi (1983), in numpy over a batch of chains, the worst of which are from time to
time replaced by the best (population annealing, Hukushima and Iba 2003). Every chain looks at several
neighbours per step. Plans cost their closed form first and are simulated towards the end
(``plan_batch.py``, which also describes the arrays ``order`` and ``sizes``); the simulator decides among the
best.

The moves: layers handed from one stage to another (those between shift), two devices exchanged with their
numbers of layers or part of the difference, an unused device taken instead of another, two neighbouring
blocks of stages exchanged (a block of one: a stage moved), a block reversed, a stage dropped, an unused
device inserted with a few layers. If clusters of devices have slow links between them, single moves hardly
ever lead from one good order of the clusters to another. So a search begins from several.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skyctl.planner.cost_model import CostModel, Placement, consecutive
from skyctl.planner.heuristic.plan_batch import Array, Ints, PlanBatch
from skyctl.planner.pipeline_depth import choose_execution, refine_execution

GIVE, HAND_ON, EXCHANGE, BLOCKS, REVERSE, DROP, INSERT = range(7)
MOVE_WEIGHTS = (0.32, 0.10, 0.24, 0.18, 0.04, 0.05, 0.07)


class MoveSampler:
    """Draws random neighbours of a whole batch of plans, one kind of move per step.

    ``most``: the most stages a plan may have.
    """

    def __init__(self, rng: np.random.Generator, most: int) -> None:
        self.rng = rng
        self.most = most
        self.kinds = np.cumsum(MOVE_WEIGHTS)

    def propose(self, order: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """A neighbour of every plan (sometimes the plan itself); new arrays where they differ."""
        kind = int(np.searchsorted(self.kinds, self.rng.random() * self.kinds[-1]))
        count = (sizes > 0).sum(axis=0)
        if kind in {GIVE, HAND_ON}:
            return order, self._give(sizes, count, near=kind == HAND_ON)
        if kind == EXCHANGE:
            return self._exchange(order, sizes, count)
        if kind == BLOCKS:
            return _reindexed(order, sizes, self._blocks(len(order), count))
        if kind == REVERSE:
            return _reindexed(order, sizes, self._reverse(len(order), count))
        return self._drop(order, sizes, count) if kind == DROP else self._insert(order, sizes, count)

    def _below(self, limit: Ints) -> Ints:
        """Uniform integers in [0, limit)."""
        return (self.rng.random(limit.shape) * limit).astype(np.intp)

    def _amount(self, limit: Ints) -> Ints:
        """How many layers to hand over: mostly one or a few, at most ``limit``."""
        drawn = np.floor(self.rng.random(limit.shape) ** -0.7).astype(np.intp)
        return np.minimum(drawn, limit)

    def _give(self, sizes: Ints, count: Ints, *, near: bool) -> Ints:
        plans = np.arange(sizes.shape[1])
        giver = self._below(count)
        if near:
            taker = giver + np.where(self.rng.random(count.shape) < 0.5, 1, -1)
            taker = np.where((taker < 0) | (taker >= count), giver, taker)
        else:
            taker = self._below(count)
        given = np.maximum(0, self._amount(sizes[giver, plans] - 1))
        out = sizes.copy()
        out[giver, plans] -= given
        out[taker, plans] += given
        return out

    def _exchange(self, order: Ints, sizes: Ints, count: Ints) -> tuple[Ints, Ints]:
        plans = np.arange(sizes.shape[1])
        i = self._below(count)
        j = self._below(np.where(self.rng.random(count.shape) < 0.15, len(order), count))
        new, out = order.copy(), sizes
        new[i, plans], new[j, plans] = order[j, plans], order[i, plans]
        if self.rng.random() < 0.75:
            out = sizes.copy()
            have, other = sizes[i, plans], sizes[j, plans]
            share = self.rng.random(count.shape) if self.rng.random() < 0.5 else 1.0
            passed = np.where(other > 0, np.rint((other - have) * share).astype(np.intp), 0)
            out[i, plans] += passed
            out[j, plans] -= np.where(i == j, 0, passed)
        return new, out

    def _cuts(self, count: Ints) -> tuple[Ints, Ints]:
        """Two random positions with 0 ≤ low < high ≤ count."""
        low = self._below(count)
        return low, low + 1 + self._below(count - low)

    def _blocks(self, rows: int, count: Ints) -> Ints:
        low, high = self._cuts(count)
        width = high - low
        shift = self._below(width)
        single = self.rng.random(count.shape)
        shift = np.where(single < 0.3, 1, np.where(single < 0.6, width - 1, shift))
        return _rotated(rows, low, high, shift)

    def _reverse(self, rows: int, count: Ints) -> Ints:
        low, high = self._cuts(count)
        r = np.arange(rows)[:, None]
        return np.where((r >= low) & (r < high), low + high - 1 - r, r)

    def _drop(self, order: Ints, sizes: Ints, count: Ints) -> tuple[Ints, Ints]:
        plans = np.arange(sizes.shape[1])
        i = self._below(count)
        taker = np.where(self.rng.random(count.shape) < 0.5, i + 1, i - 1)
        taker = np.where(self.rng.random(count.shape) < 0.3, self._below(count), taker)
        taker = np.where((taker < 0) | (taker >= count) | (taker == i), np.where(i > 0, 0, 1), taker)
        dropped = count > 1
        taker = np.where(dropped, taker, i)
        out = sizes.copy()
        given = np.where(dropped, sizes[i, plans], 0)
        out[i, plans] -= given
        out[taker, plans] += given
        end = np.where(dropped, len(order), i + 1)
        return _reindexed(order, out, _rotated(len(order), i, end, 1))

    def _insert(self, order: Ints, sizes: Ints, count: Ints) -> tuple[Ints, Ints]:
        rows = len(order)
        plans = np.arange(sizes.shape[1])
        can = count < min(rows, self.most)
        idle = np.where(can, count + self._below(np.maximum(rows - count, 1)), 0)
        at = np.where(can, self._below(count + 1), 0)
        new, out = _reindexed(order, sizes, _rotated(rows, at, idle + 1, idle - at))
        giver = np.where(self.rng.random(count.shape) < 0.5, at + 1, self._below(count + 1))
        giver = np.where(giver > count, at - 1, giver)
        giver = np.where(giver == at, np.where(at > 0, at - 1, at + 1), giver)
        giver = np.where(can, giver, 0)
        limit = out[giver, plans] - 1
        given = np.maximum(0, self._amount(limit))
        half = self.rng.random(count.shape) < 0.4
        given = np.where(half, self._below(np.maximum(limit, 0) + 1), given)
        given = np.where(can, given, 0)
        out[giver, plans] -= given
        out[at, plans] += given
        failed = can & (given == 0)
        if failed.any():  # nothing to give: leave the plan as it is
            new, out = np.where(failed, order, new), np.where(failed, sizes, out)
        return new, out


def _rotated(rows: int, low: Ints, high: Ints, shift: Ints | int) -> Ints:
    """Row indices with [low, high) rotated towards low by ``shift``."""
    r = np.arange(rows)[:, None]
    width = np.maximum(high - low, 1)
    turned = low + (r - low + shift) % width
    return np.where((r >= low) & (r < high), turned, r)


def _reindexed(order: Ints, sizes: Ints, index: Ints) -> tuple[Ints, Ints]:
    return np.take_along_axis(order, index, axis=0), np.take_along_axis(sizes, index, axis=0)


def reorder_blocks(
    model: CostModel, placement: Placement, number: int, rng: np.random.Generator
) -> list[Placement]:
    """At most ``number`` allowed plans: the given one, and others with its blocks reordered, some reversed.

    A block is what lies between two slow boundaries. Only the given plan where no boundary is much slower
    than the others.
    """
    blocks = _blocks(model, placement)
    out = [placement]
    if len(blocks) < 2:
        return out
    for _ in range(4 * number):
        if len(out) >= number:
            break
        order = [blocks[i] for i in rng.permutation(len(blocks))]
        turned = [block[::-1] if rng.random() < 0.5 else block for block in order]
        plan = consecutive((stage.device, stage.stop - stage.start) for block in turned for stage in block)
        if plan not in out and model.is_allowed(plan):
            out.append(plan)
    return out


def _blocks(model: CostModel, placement: Placement) -> list[Placement]:
    seconds = []
    for a, b in pairwise(placement):
        both = (model.occupancy_s(a.device, b.device, a.stop), model.occupancy_s(b.device, a.device, a.stop))
        seconds.append(sum(busy + latency for busy, latency in both))
    slow = [i + 1 for i, x in enumerate(seconds) if 2 * x > max(seconds) > 0]
    if 2 * len(slow) > len(seconds):
        return [placement]
    cuts = [0, *slow, len(placement)]
    return [placement[p:q] for p, q in pairwise(cuts)]


Progress = Callable[[], float]
"""The share of the search that is over; 1 ends it."""


@dataclass(frozen=True)
class AnnealingEffort:
    """How a search spends its time.

    Attributes:
        rows: devices times chains.
        islands: groups of chains that are replaced only by chains of their own group, until
            ``ONE_ISLAND_FROM``.
        hot, cold: first and last temperature, relative to the best cost.
        moves_hot: with many devices the first temperature is no more than what a small move changes.
    """

    rows: int
    islands: int
    hot: float
    cold: float
    moves_hot: bool = False

    def chains(self, devices: int) -> int:
        """How many chains search at once, for that many devices."""
        return min(MOST_CHAINS, max(LEAST_CHAINS, self.rows // devices))

    def first(self, devices: int) -> float:
        """The first temperature, relative to the best cost."""
        return min(self.hot, max(0.002, 0.16 / devices)) if self.moves_hot else self.hot


SMALL_FLEET_EFFORT = AnnealingEffort(1024, 16, 0.03, 0.0001)
QUICK_EFFORT = AnnealingEffort(1536, 1, 0.01, 0.0001, moves_hot=True)
THOROUGH_EFFORT = AnnealingEffort(3072, 16, 0.015, 0.0002)
SIMULATED_FROM = 0.85
"""From this share of the search on, plans are simulated instead of costed in closed form."""
ONE_ISLAND_FROM = 0.7
"""From this share of the search on, chains may be replaced by those of any island."""
NEIGHBOURS = 2
"""Neighbours that every chain looks at in a step."""
REPLACED = 0.25
"""Share of an island's chains that are replaced by its best."""
MOST_CHAINS, LEAST_CHAINS = 128, 16
FINALISTS = 6
MAX_CELLS = 1 << 23
"""Devices × layers up to which annealing is tried."""
DEPTHS_TRIED = 40
"""Depths simulated for one of the last plans, at most."""
ACTIONS = 50_000
"""Forwards and backwards simulated for the depths of one of the last plans, at most."""


def improve_until(model: CostModel, placement: Placement, deadline: float, seed: int = 0) -> Placement:
    """A plan at least as good as ``placement`` (which must be allowed), by annealing until ``deadline``.

    ``deadline``: in seconds of ``time.perf_counter``.
    """
    begin = time.perf_counter()
    if model.devices < 2 or model.layers < 2 or model.devices * model.layers > MAX_CELLS:
        return placement
    reserve = min(0.1 * (deadline - begin), 1.0)  # for the simulator at the end
    span = deadline - reserve - begin
    if span <= 0:
        return placement
    starts = reorder_blocks(model, placement, THOROUGH_EFFORT.islands, np.random.default_rng(seed))
    plans = anneal(
        PlanBatch(model), starts, lambda: (time.perf_counter() - begin) / span, seed, THOROUGH_EFFORT
    )
    return best_simulated(model, [placement, *plans], deadline)


def counted_progress(count: int, deadline: float = math.inf) -> Progress:
    """Progress by counting: the same search every time, unless it is not over by the deadline."""
    done = iter(range(count + 1))
    return lambda: 1.0 if time.perf_counter() > deadline else next(done, count) / count


def best_simulated(model: CostModel, plans: Sequence[Placement], deadline: float = float("inf")) -> Placement:
    """The plan that the simulator finds best; ties go to the earlier one. The first is always simulated."""
    best = plans[0]
    least = _simulated_s(model, best)
    for plan in dict.fromkeys(plans[1:]):
        if time.perf_counter() > deadline:
            break
        if not model.is_allowed(plan):
            continue
        value = _simulated_s(model, plan)
        if value < least:
            best, least = plan, value
    return best


def _simulated_s(model: CostModel, plan: Placement) -> float:
    """The plan's objective, with depths chosen by a short search where they are a choice."""
    simulations = min(DEPTHS_TRIED, ACTIONS // (2 * model.microbatches * len(plan)))
    return refine_execution(
        model, plan, *choose_execution(model, plan), simulations=simulations, slowdown=0.0
    )[0]


def anneal(
    batch: PlanBatch,
    starts: Sequence[Placement],
    progress: Progress,
    seed: int,
    effort: AnnealingEffort = QUICK_EFFORT,
) -> list[Placement]:
    """Good plans, the best first.

    Args:
        starts: allowed plans that the chains begin with.
        progress: the share of the search that is over.
    """
    devices = batch.model.devices
    chains, hot = effort.chains(devices), effort.first(devices)
    size = max(1, chains // effort.islands)
    search = _Chains(batch, [starts[i // size % len(starts)] for i in range(chains)], seed)
    replaced_at = 0.0
    steps_since = 0
    share = progress()
    while share < 1:
        if share >= SIMULATED_FROM:
            search.begin_simulating()
        search.step(hot * (effort.cold / hot) ** share)
        steps_since += 1
        if share - replaced_at > 0.01 and steps_since >= 10:
            search.replace_worst(size if share < ONE_ISLAND_FROM else chains)
            replaced_at, steps_since = share, 0
        share = progress()
    return search.finalists()


class _Chains:
    """The chains, one per column, and the best plans seen."""

    def __init__(self, batch: PlanBatch, starts: Sequence[Placement], seed: int) -> None:
        self.batch = batch
        self.rng = np.random.default_rng(seed)
        self.moves = MoveSampler(self.rng, batch.model.max_stages)
        self.order, self.sizes = batch.encode(starts)
        self.cost = batch.cost_s(self.order, self.sizes)
        self.simulating = False
        self.best: list[tuple[float, Ints, Ints]] = []
        self._note()

    def begin_simulating(self) -> None:
        """From now on costs are simulated, for schedules where a batch can be."""
        if not self.simulating and self.batch.can_simulate:
            self.cost = self.batch.simulated_cost_s(self.order, self.sizes, np.full(self.cost.shape, np.inf))
            self.best = []
            self._note()
        self.simulating = True

    def step(self, temperature: float) -> None:
        """Every chain goes to the first of its neighbours that is accepted, if any."""
        order = np.repeat(self.order, NEIGHBOURS, axis=1)
        sizes = np.repeat(self.sizes, NEIGHBOURS, axis=1)
        order, sizes = self.moves.propose(order, sizes)
        scale = temperature * self.best[0][0]
        allowed = np.repeat(self.cost, NEIGHBOURS) + scale * self.rng.standard_exponential(order.shape[1])
        cost = self._cost(order, sizes, allowed)
        accepted = (cost <= allowed).reshape(-1, NEIGHBOURS)
        first = accepted.argmax(axis=1)
        moved = np.flatnonzero(accepted.any(axis=1))
        if not len(moved):
            return
        taken = moved * NEIGHBOURS + first[moved]
        self.order[:, moved] = order[:, taken]
        self.sizes[:, moved] = sizes[:, taken]
        self.cost[moved] = cost[taken]
        self._note()

    def _cost(self, order: Ints, sizes: Ints, below: Array) -> Array:
        if self.simulating:
            return self.batch.simulated_cost_s(order, sizes, below)
        return self.batch.cost_s(order, sizes)

    def _note(self) -> None:
        i = int(self.cost.argmin())
        if not self.best or self.cost[i] < self.best[0][0]:
            entry = (float(self.cost[i]), self.order[:, i].copy(), self.sizes[:, i].copy())
            self.best = [entry, *self.best[: FINALISTS - 1]]

    def replace_worst(self, size: int) -> None:
        """Among each ``size`` chains the worst become copies of the best."""
        number = int(size * REPLACED)
        for low in range(0, len(self.cost), size) if number else ():
            rank = low + np.argsort(self.cost[low : low + size], kind="stable")
            good, bad = rank[:number], rank[-number:]
            self.order[:, bad] = self.order[:, good]
            self.sizes[:, bad] = self.sizes[:, good]
            self.cost[bad] = self.cost[good]

    def finalists(self) -> list[Placement]:
        """The best plans seen, and those of the best chains at the end."""
        rank = np.argsort(self.cost, kind="stable")[:FINALISTS]
        columns = [(order, sizes) for _, order, sizes in self.best]
        columns += [(self.order[:, i], self.sizes[:, i]) for i in rank]
        return list(dict.fromkeys(self.batch.decode(*column) for column in columns))
