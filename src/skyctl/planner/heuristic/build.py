"""From even to nearly optimal in milliseconds: level good orders, climb over orders, polish what is best.

Sky Computing's two phases (``level.py``) for several orders of the devices; then local search: swap, move,
drop and insert devices while the levelled estimate falls; then boundaries and neighbours by the simulator.
Give-away works in both directions, devices may stay unused, and the result is never worse than a feasible
even split. Deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyctl.errors import UndecidedError
from skyctl.planner.bottleneck import subsets
from skyctl.planner.evaluate import bound_s, value_s
from skyctl.planner.heuristic.even import even
from skyctl.planner.heuristic.level import estimate_s, level
from skyctl.planner.heuristic.refine import refine
from skyctl.planner.infeasible import raise_infeasible
from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]
KEPT = 3
FEW = 8
REFINED = 6
TRIES = 4000
ROUNDS = 40


def heuristic(model: Model, plays: int = 150) -> Pieces:
    """A good plan.

    Args:
        plays: how many candidates may be simulated.

    Raises:
        InfeasibleError: proved that nothing fits.
        UndecidedError: nothing found; there may be a plan all the same.
    """
    starts = _starts(model)
    if not starts:
        if not subsets.can(model):
            raise_infeasible(model, proved=False)
            raise UndecidedError(
                "no plan that fits in memory was found, and it is not proved that there is none",
                hint="try --strategy optimal with a longer --time-limit",
            )
        found = subsets.cover(model, float("inf"))
        if found is None:
            raise_infeasible(model, proved=True)
            raise AssertionError("unreachable")
        starts = [found]
    scored = sorted((value_s(model, pieces)[0], i) for i, pieces in enumerate(starts))
    if model.by_iteration:
        few = model.devices <= FEW
        chosen = scored[: REFINED if few else KEPT]
        refined = (refine(model, starts[i], TRIES if few else TRIES // 4) for _, i in chosen)
        starts += [pieces for pieces in dict.fromkeys(refined) if pieces not in starts]
        scored = sorted((value_s(model, pieces)[0], i) for i, pieces in enumerate(starts))
    best = min(
        (_polish(model, starts[i], value, plays // min(KEPT, len(scored))) for value, i in scored[:KEPT]),
        key=lambda entry: entry[0],
    )
    return best[1]


def _starts(model: Model) -> list[Pieces]:
    """Distinct good plans, one a starting order, and the even split where it is allowed."""
    found: dict[Pieces, None] = {}
    seen: set[tuple[int, ...]] = set()
    for order in _orders(model):
        if order in seen:
            continue
        seen.add(order)
        levelled = level(model, order)
        if levelled is None:
            continue
        found[levelled[1]] = None
        found[_climb(model, levelled)] = None
        if len(found) >= 4 * KEPT and model.devices > FEW:
            break
    plain = even(model)
    if model.allowed(plain):
        found[plain] = None
    return list(found)


def _orders(model: Model) -> Iterator[tuple[int, ...]]:
    """Orders to start from: inventory, fast first, fast last, near neighbours; all, then fewer devices."""
    devices = list(range(model.devices))
    fast = sorted(devices, key=lambda d: (model.work[d][-1], d))
    roomy = sorted(devices, key=lambda d: (-min(model.available[d], 1e300), model.work[d][-1], d))
    near = _near(model, fast)
    most = model.max_stages
    for ranked in (fast, roomy, near):
        yield _placed(model, [d for d in devices if d in ranked[:most]])
        yield _placed(model, ranked[:most])
        yield _placed(model, ranked[:most][::-1])
    for count in range(most - 1, 0, -1):
        for ranked in (near, fast, roomy):
            yield _placed(model, ranked[:count])
            yield _placed(model, ranked[:count][::-1])


def _near(model: Model, fast: list[int]) -> list[int]:
    """From the fastest on, always the device that is nearest for a message of mean size."""
    size = sum(model.output) / model.layers
    chain, rest = [fast[0]], fast[1:]
    while rest:
        a = chain[-1]

        def cost(b: int, a: int = a) -> float:
            way = model.way(a, b)
            return way.latency_s + size * max((way.seconds_per_byte, *(x for _, x in way.shared)))

        nearest = min(rest, key=lambda b: (cost(b), rest.index(b)))
        chain.append(nearest)
        rest.remove(nearest)
    return chain


def _placed(model: Model, order: Sequence[int]) -> tuple[int, ...]:
    """The order with devices that may be first and last brought there (added where none is in it)."""
    rest = list(order)
    firsts = [d for d in rest if d in model.first] or sorted(model.first)
    if not firsts:
        return tuple(rest)
    if rest and rest[0] not in model.first:
        lead = next((d for d in firsts if d not in model.last), firsts[0])
        rest = [lead, *(d for d in rest if d != lead)]
    if rest and rest[-1] not in model.last:
        lasts = [d for d in rest[1:] if d in model.last] or [d for d in sorted(model.last) if d != rest[0]]
        if lasts:
            rest = [*(d for d in rest if d != lasts[-1]), lasts[-1]]
    return tuple(rest[: model.max_stages]) if rest[-1] in model.last else tuple(rest)


def _climb(model: Model, start: tuple[float, Pieces]) -> Pieces:
    """Local search over orders: take a neighbour that can be levelled below the best."""
    best = start
    for _ in range(ROUNDS):
        order = [piece.device for piece in best[1]]
        better = None
        for other in _neighbours(model, order):
            better = level(model, other, best[0])
            if better is not None and better[0] < best[0] * (1 - 1e-9):
                break
            better = None
        if better is None:
            break
        best = better
    return best[1]


def _neighbours(model: Model, order: list[int]) -> Iterator[list[int]]:
    """Swap two, insert or exchange an unused one, drop one, move one."""
    count = len(order)
    idle = [d for d in range(model.devices) if d not in order]
    for i in range(count):
        for j in range(i + 1, count):
            other = list(order)
            other[i], other[j] = other[j], other[i]
            yield other
    if count < model.max_stages:
        for d in idle:
            for i in range(count + 1):
                yield [*order[:i], d, *order[i:]]
    for d in idle:
        for i in range(count):
            yield [*order[:i], d, *order[i + 1 :]]
    if count > 1:
        for i in range(count):
            yield [*order[:i], *order[i + 1 :]]
    for i in range(count):
        for j in range(count):
            if abs(i - j) > 1:
                other = [d for d in order if d != order[i]]
                other.insert(j, order[i])
                yield other


def _polish(model: Model, pieces: Pieces, value: float, plays: int) -> tuple[float, Pieces]:
    """First improvement by the true objective; a closed-form bound saves most of the simulations."""
    if not model.by_iteration and len(pieces) > 1:
        plays *= 4  # no simulation needed: cheap
    improved = True
    while improved and plays > 0:
        improved = False
        for other in _moves(model, pieces):
            if not model.allowed(other):
                continue
            if (bound_s(model, other) if model.by_iteration else estimate_s(model, other)) >= value:
                continue
            plays -= 1
            cost = value_s(model, other)[0]
            if cost < value * (1 - 1e-12):
                pieces, value, improved = other, cost, True
                break
            if plays <= 0:
                break
    return value, pieces


def _moves(model: Model, pieces: Pieces) -> Iterator[Pieces]:
    """Boundaries either way, devices exchanged with the cuts kept, then other orders levelled anew."""
    for i in range(len(pieces) - 1):
        a, b = pieces[i], pieces[i + 1]
        for step in (1, -1, 2, -2, 4, -4):
            cut = a.stop + step
            if a.start < cut < b.stop:
                yield (*pieces[:i], a._replace(stop=cut), b._replace(start=cut), *pieces[i + 2 :])
    for i in range(len(pieces)):
        for j in range(i + 1, len(pieces)):
            other = list(pieces)
            other[i] = pieces[i]._replace(device=pieces[j].device)
            other[j] = pieces[j]._replace(device=pieces[i].device)
            yield tuple(other)
    if model.by_iteration and model.devices <= FEW:
        for order in _neighbours(model, [piece.device for piece in pieces]):
            levelled = level(model, order)
            if levelled is not None:
                yield levelled[1]
