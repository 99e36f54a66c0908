"""Simulated annealing over orders of devices and their numbers of layers, many chains at once.

Kirkpatrick, Gelatt and Vecchi (1983), in numpy over a batch of chains that from time to time take over
better ones (population annealing, Hukushima and Iba 2003). Every chain looks at several neighbours a step.
Plans cost their closed form first and are played towards the end (``batch.py``); the simulator decides among
the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from skyctl.planner.depths import refined, value_s
from skyctl.planner.heuristic.batch import Batch
from skyctl.planner.heuristic.blocks import reordered
from skyctl.planner.heuristic.moves import Moves
from skyctl.planner.heuristic.plays import Array, Ints
from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]
Progress = Callable[[], float]
"""The share of the search that is over; 1 ends it."""


@dataclass(frozen=True)
class Effort:
    """How a search spends its time.

    ``rows``: devices times chains. ``islands``: groups of chains that take over from each other only, until
    ``ALONE``. ``hot``, ``cold``: first and last temperature, relative to the best cost; ``moves_hot`` true:
    the first no more than what a small move changes where there are many devices.
    """

    rows: int
    islands: int
    hot: float
    cold: float
    moves_hot: bool = False

    def chains(self, devices: int) -> int:
        """How many."""
        return min(MOST_CHAINS, max(LEAST_CHAINS, self.rows // devices))

    def first(self, devices: int) -> float:
        """The first temperature, relative."""
        return min(self.hot, max(0.002, 0.16 / devices)) if self.moves_hot else self.hot


SMALL = Effort(1024, 16, 0.03, 0.0001)
QUICK = Effort(1536, 1, 0.01, 0.0001, moves_hot=True)
THOROUGH = Effort(3072, 16, 0.015, 0.0002)
PLAYED = 0.85
"""From this share on, plans are played instead of the closed form."""
ALONE = 0.7
"""From this share on, chains take over from all islands."""
NEIGHBOURS = 2
TAKEN_OVER = 0.25
MOST_CHAINS, LEAST_CHAINS = 128, 16
FINALISTS = 6
MAX_CELLS = 1 << 23
LOOKED_AT = 40
ACTIONS = 50_000
"""Depths played for one of the last plans, and forwards and backwards of all of them together."""


def improve(model: Model, pieces: Pieces, deadline: float, seed: int = 0) -> Pieces:
    """A plan at least as good as ``pieces`` (which must be allowed), by annealing until ``deadline``
    (``time.perf_counter``)."""
    begin = time.perf_counter()
    if model.devices < 2 or model.layers < 2 or model.devices * model.layers > MAX_CELLS:
        return pieces
    reserve = min(0.1 * (deadline - begin), 1.0)  # for the simulator at the end
    span = deadline - reserve - begin
    if span <= 0:
        return pieces
    starts = reordered(model, pieces, THOROUGH.islands, np.random.default_rng(seed))
    found = anneal(Batch(model), starts, lambda: (time.perf_counter() - begin) / span, seed, THOROUGH)
    return best_of(model, [pieces, *found], deadline)


def steps(count: int) -> Progress:
    """Progress by counting: the same search every time."""
    done = iter(range(count + 1))
    return lambda: next(done, count) / count


def best_of(model: Model, plans: Sequence[Pieces], deadline: float = float("inf")) -> Pieces:
    """The one that the simulator finds best; ties go to the first. The first is always looked at."""
    best = plans[0]
    least = _value_s(model, best)
    for plan in dict.fromkeys(plans[1:]):
        if time.perf_counter() > deadline:
            break
        if not model.allowed(plan):
            continue
        value = _value_s(model, plan)
        if value < least:
            best, least = plan, value
    return best


def _value_s(model: Model, plan: Pieces) -> float:
    """With depths that are chosen with some care where they are a choice."""
    plays = min(LOOKED_AT, ACTIONS // (2 * model.microbatches * len(plan)))
    return refined(model, plan, *value_s(model, plan), plays=plays, little=0.0)[0]


def anneal(
    batch: Batch, starts: Sequence[Pieces], progress: Progress, seed: int, effort: Effort = QUICK
) -> list[Pieces]:
    """Good plans, the best first. ``starts``: allowed plans that the chains begin with."""
    devices = batch.model.devices
    chains, hot = effort.chains(devices), effort.first(devices)
    size = max(1, chains // effort.islands)
    search = _Search(batch, [starts[i // size % len(starts)] for i in range(chains)], seed)
    taken_over = 0.0
    steps_since = 0
    share = progress()
    while share < 1:
        if share >= PLAYED:
            search.begin_playing()
        search.step(hot * (effort.cold / hot) ** share)
        steps_since += 1
        if share - taken_over > 0.01 and steps_since >= 10:
            search.take_over(size if share < ALONE else chains)
            taken_over, steps_since = share, 0
        share = progress()
    return search.finalists()


class _Search:
    """The chains, one a column, and the best plans seen."""

    def __init__(self, batch: Batch, starts: Sequence[Pieces], seed: int) -> None:
        self.batch = batch
        self.rng = np.random.default_rng(seed)
        self.moves = Moves(self.rng, batch.model.max_stages)
        self.order, self.sizes = batch.encode(starts)
        self.cost = batch.cost_s(self.order, self.sizes)
        self.playing = False
        self.best: list[tuple[float, Ints, Ints]] = []
        self._note()

    def begin_playing(self) -> None:
        """From now on costs are played."""
        if not self.playing and self.batch.playable:
            self.cost = self.batch.played_s(self.order, self.sizes, np.full(self.cost.shape, np.inf))
            self.best = []
            self._note()
        self.playing = True

    def step(self, temperature: float) -> None:
        """Every chain goes to the first of its neighbours that is accepted, if any."""
        order = np.repeat(self.order, NEIGHBOURS, axis=1)
        sizes = np.repeat(self.sizes, NEIGHBOURS, axis=1)
        order, sizes = self.moves.propose(order, sizes)
        heat = temperature * self.best[0][0]
        allowed = np.repeat(self.cost, NEIGHBOURS) + heat * self.rng.standard_exponential(order.shape[1])
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
        if self.playing:
            return self.batch.played_s(order, sizes, below)
        return self.batch.cost_s(order, sizes)

    def _note(self) -> None:
        i = int(self.cost.argmin())
        if not self.best or self.cost[i] < self.best[0][0]:
            entry = (float(self.cost[i]), self.order[:, i].copy(), self.sizes[:, i].copy())
            self.best = [entry, *self.best[: FINALISTS - 1]]

    def take_over(self, size: int) -> None:
        """The worst chains become copies of the best, among each ``size`` chains."""
        number = int(size * TAKEN_OVER)
        for low in range(0, len(self.cost), size) if number else ():
            rank = low + np.argsort(self.cost[low : low + size], kind="stable")
            good, bad = rank[:number], rank[-number:]
            self.order[:, bad] = self.order[:, good]
            self.sizes[:, bad] = self.sizes[:, good]
            self.cost[bad] = self.cost[good]

    def finalists(self) -> list[Pieces]:
        """The best seen, and the best chains at the end."""
        rank = np.argsort(self.cost, kind="stable")[:FINALISTS]
        columns = [(order, sizes) for _, order, sizes in self.best]
        columns += [(self.order[:, i], self.sizes[:, i]) for i in rank]
        return list(dict.fromkeys(self.batch.decode(*column) for column in columns))
