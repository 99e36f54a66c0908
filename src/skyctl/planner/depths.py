"""How deep each stage's pipeline is: microbatches in flight, weight gradients behind, who recomputes.

Little's law gives the start: a microbatch that is away from a stage for n periods needs n + 1 of them in
flight there. A few such depths are played for every candidate (``value_s``); for the plan that is handed out
a coordinate search follows, and then the least memory that keeps the step within ``LITTLE`` (``refined``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from skyctl.planner.evaluate import bottleneck_s, least_running, most_within, objective_s, step_s
from skyctl.planner.model import Model, Piece
from skyctl.planner.running import Running

T = TypeVar("T")

LITTLE = 1e-3
"""Relative: a step this much longer is worth less memory."""
BETTER = 1e-9
MORE = (0.0, 1.0, 2.0)
"""Microbatches in flight beyond Little's law that are tried: stages do not wait for each other evenly."""
ACTIONS = 200_000
"""Forwards and backwards played by one coordinate search, about 0.1 s."""
STEPS = (1, 2, 4)
SAVING = 16
"""Steps played at least to save memory."""


def value_s(model: Model, pieces: Sequence[Piece]) -> tuple[float, Running]:
    """(the objective, how the stages run) of an allowed plan, by a few choices of depth."""
    base = least_running(model, pieces)
    if not model.by_iteration:
        return bottleneck_s(model, pieces, base), base
    if not model.eager:
        return step_s(model, pieces, base), base
    best: tuple[float, Running] | None = None
    for running in choices(model, pieces, base):
        value = step_s(model, pieces, running)
        if best is None or value < best[0]:
            best = (value, running)
    assert best is not None
    return best


def choices(model: Model, pieces: Sequence[Piece], base: Running) -> list[Running]:
    """Depths to try, the least first."""
    count = len(pieces)
    most = _most(model, pieces, base)
    away = _periods(model, pieces, base)
    flying = [base.flying]
    for more in MORE:
        wanted: list[int] = []
        for s in range(count):
            number = math.ceil(away[s] * (1 - 1e-9) + (more if s < count - 1 else 0.0))
            number = max(base.flying[s], min(most[s], number))
            wanted.append(min(number, wanted[-1]) if wanted else number)
        flying.append(tuple(wanted))
    flying.append(most)
    out = [base._replace(flying=numbers) for numbers in dict.fromkeys(flying)]
    if not model.zero:
        return out
    # ZB-H1: the later a stage, the earlier its last backward, and the more is left to do after it
    later = [_put_off(model, pieces, one, tuple(range(count))) for one in out]
    return list(dict.fromkeys([*out, *later]))


def _most(model: Model, pieces: Sequence[Piece], base: Running) -> tuple[int, ...]:
    out: list[int] = []
    for piece, low, again in zip(pieces, base.flying, base.recompute, strict=True):
        high = max(low, out[-1] if out else model.microbatches)
        out.append(most_within(model, piece, low, high, again))
    return tuple(out)


def _periods(model: Model, pieces: Sequence[Piece], base: Running) -> list[float]:
    """Per stage, from a forward's start to its backward's end, nobody in the way, in periods."""
    again = [f if r else 0.0 for f, r in zip(model.forward.of(pieces), base.recompute, strict=True)]
    beside = [2 * model.beside_s(*piece) for piece in pieces]
    busy = [sum(parts) for parts in zip(model.work.of(pieces), again, beside, strict=True)]
    period, trip, trips = max(busy), 0.0, [0.0] * len(pieces)
    for s in range(len(pieces) - 1, -1, -1):
        trip += busy[s]
        trips[s] = trip
        if s:
            a, b = pieces[s - 1], pieces[s]
            for x, y in ((a.device, b.device), (b.device, a.device)):
                seconds, latency_s = model.occupancy_s(x, y, a.stop)
                period = max(period, seconds)
                trip += seconds + latency_s
    if period <= 0:
        return [1.0] * len(pieces)
    return [min(x / period, float(model.microbatches)) for x in trips]


def _put_off(model: Model, pieces: Sequence[Piece], running: Running, wanted: Sequence[int]) -> Running:
    """With weight gradients that far behind, where memory allows it."""
    behind = []
    for (d, p, q), k, again, number in zip(pieces, running.flying, running.recompute, wanted, strict=True):
        number = 0 if again else min(number, model.microbatches - 1)  # noqa: PLW2901
        while number and not model.fits(d, p, q, k, number, False):
            number -= 1  # noqa: PLW2901
        behind.append(number)
    return running._replace(behind=tuple(behind))


def refined(
    model: Model,
    pieces: Sequence[Piece],
    value: float,
    running: Running,
    *,
    plays: int | None = None,
    little: float = LITTLE,
) -> tuple[float, Running]:
    """A better way to run the same stages, by coordinate search; then one that needs less memory.

    Args:
        value, running: from ``value_s``.
        plays: how many steps to simulate (default: what ``ACTIONS`` allows).
        little: how much longer a step may be for less memory, relative; 0: memory is not saved.
    """
    if not (model.eager and model.by_iteration) and not any(running.recompute):
        return value, running
    if plays is None:
        plays = ACTIONS // (2 * model.microbatches * len(pieces))
    search = _Search(model, pieces, value, running, plays)
    search.climb()
    search.save(little)
    return search.value, search.running


class _Search:
    """One plan's coordinate search. ``plays``: left to simulate."""

    def __init__(
        self, model: Model, pieces: Sequence[Piece], value: float, running: Running, plays: int
    ) -> None:
        self.model = model
        self.pieces = pieces
        self.value, self.running = value, running
        self.plays = plays
        self.least = least_running(model, pieces).flying
        self.known: dict[Running, float] = {running: value}

    def _value_s(self, running: Running) -> float:
        if running not in self.known:
            self.plays -= 1
            self.known[running] = objective_s(self.model, self.pieces, running)
        return self.known[running]

    def _allowed(self, running: Running) -> bool:
        return all(
            0 < k <= self.model.microbatches
            and 0 <= behind < max(1, self.model.microbatches)
            and not (again and behind)
            and self.model.fits(d, p, q, k, behind, again)
            for (d, p, q), k, behind, again in zip(self.pieces, *running, strict=True)
        )

    def climb(self) -> None:
        """First improvement over ``_near`` until none is left or the plays are used up."""
        improved = True
        while improved and self.plays > 0:
            improved = False
            for other in self._near():
                if self.plays <= 0:
                    return
                if other in self.known or not self._allowed(other):
                    continue
                value = self._value_s(other)
                if value < self.value * (1 - BETTER):
                    self.value, self.running, improved = value, other, True
                    break

    def _near(self) -> Iterator[Running]:
        running, count = self.running, len(self.pieces)
        if self.model.mixed:
            for s in range(count):
                again = _with(running.recompute, s, not running.recompute[s])
                yield running._replace(recompute=again, behind=_with(running.behind, s, 0))
        if not (self.model.eager and self.model.by_iteration):
            return
        for step in STEPS:
            for s in range(count):
                yield self._deeper(s, step)
                yield self._shallower(s, step)
                if s:
                    yield self._all_deeper(s, step)
            if self.model.zero:
                for s in range(count):
                    for behind in (running.behind[s] + step, running.behind[s] - step):
                        yield running._replace(behind=_with(running.behind, s, max(0, behind)))
                yield running._replace(behind=tuple(max(0, x - step) for x in running.behind))
                yield _put_off(self.model, self.pieces, running, [x + step for x in running.behind])

    def _deeper(self, s: int, step: int) -> Running:
        number = min(self.running.flying[s] + step, self.model.microbatches)
        before = (max(k, number) for k in self.running.flying[: s + 1])
        return self.running._replace(flying=(*before, *self.running.flying[s + 1 :]))

    def _all_deeper(self, s: int, step: int) -> Running:
        """All stages up to s."""
        more = (min(k + step, self.model.microbatches) for k in self.running.flying[: s + 1])
        return self.running._replace(flying=(*more, *self.running.flying[s + 1 :]))

    def _shallower(self, s: int, step: int) -> Running:
        number = self.running.flying[s] - step
        after = (
            max(least, min(k, number))
            for k, least in zip(self.running.flying[s:], self.least[s:], strict=True)
        )
        return self.running._replace(flying=(*self.running.flying[:s], *after))

    def save(self, little: float) -> None:
        """Fewer in flight, less put off and nothing recomputed where the step stays within ``little``."""
        if not little:
            return
        limit = self.value * (1 + little)
        self.plays = max(self.plays, SAVING)
        for s, again in enumerate(self.running.recompute):
            if again:
                self._take(self.running._replace(recompute=_with(self.running.recompute, s, False)), limit)
        start = self.running
        for share in (0.0, 0.25, 0.5, 0.75):
            if self._take(self._less(start, share), limit):
                break
        for s in range(len(self.pieces) - 1, -1, -1):
            after = self.running.flying[s + 1] if s + 1 < len(self.pieces) else 1
            self._fewest(s, "flying", max(self.least[s], after), limit)
            self._fewest(s, "behind", 0, limit)

    def _less(self, start: Running, share: float) -> Running:
        flying = (a + math.ceil(share * (k - a)) for a, k in zip(self.least, start.flying, strict=True))
        return start._replace(flying=tuple(flying), behind=tuple(int(share * x) for x in start.behind))

    def _take(self, running: Running, limit: float) -> bool:
        if running == self.running:
            return True
        if not self._allowed(running) or (self.plays <= 0 and running not in self.known):
            return False
        value = self._value_s(running)
        if value > limit:
            return False
        self.value, self.running = value, running
        return True

    def _fewest(self, s: int, field: str, least: int, limit: float) -> None:
        """The least number of one stage that keeps the limit, by bisection."""
        low, high = least, getattr(self.running, field)[s]
        while low < high:
            middle = (low + high) // 2
            numbers = _with(getattr(self.running, field), s, middle)
            if self._take(self.running._replace(**{field: numbers}), limit):
                high = middle
            else:
                low = middle + 1


def _with(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
