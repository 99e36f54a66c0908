"""From even to nearly optimal in milliseconds.

``bottleneck``: a narrow beam from the last layer to the first (``sweep.py``). ``iteration``: plans for a few
orders of the devices, levelled (both phases of Sky Computing, ``level.py``), then annealing over orders and
numbers of layers with a counted number of steps, so that the same problem gives the same plan. Devices may
stay unused, and the result is never worse than a feasible even split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyctl.errors import UndecidedError
from skyctl.planner.bottleneck import subsets
from skyctl.planner.heuristic.anneal import MAX_CELLS, QUICK, SMALL, anneal, best_of, steps
from skyctl.planner.heuristic.batch import Batch
from skyctl.planner.heuristic.even import even
from skyctl.planner.heuristic.level import level
from skyctl.planner.heuristic.sweep import Sweep
from skyctl.planner.infeasible import raise_infeasible
from skyctl.planner.model import Model, Piece
from skyctl.schedule.actions import ONE_F_ONE_B

Pieces = tuple[Piece, ...]
FEW = 24
SMALL_FLEET = 8
WIDTH = 32
PROBES = 12
TOLERANCE = 3e-4
STAGES_LEVELLED = 400
KEPT = 8


def heuristic(model: Model, plays: int = 150) -> Pieces:
    """A good plan.

    Args:
        plays: how long to search, for ``iteration``: in proportion.

    Raises:
        InfeasibleError: proved that nothing fits.
        UndecidedError: nothing found; there may be a plan all the same.
    """
    plans = _starts(model) or [_any_plan(model)]
    if model.by_iteration and model.devices > 1 and model.devices * model.layers <= MAX_CELLS:
        batch = Batch(model)
        cost = batch.cost_s(*batch.encode(plans))
        ranked = [plans[i] for i in cost.argsort(kind="stable")[:KEPT]]
        effort = SMALL if model.devices <= SMALL_FLEET else QUICK
        count = _steps(model, plays)
        played: list[Pieces] = []
        if model.eager:  # where nothing is gained by depth, what is played as 1F1B is better known
            plain = Model(model.problem.model_copy(update={"schedule": ONE_F_ONE_B}))
            count = count if model.devices <= SMALL_FLEET else count // 2
            played = anneal(Batch(plain), ranked, steps(count), seed=0, effort=effort)[:KEPT]
        found = anneal(batch, ranked, steps(count), seed=0, effort=effort)
        plans = [ranked[0], *found, *played, *(plan for plan in plans if plan == even(model))]
    return best_of(model, plans)


def _steps(model: Model, plays: int) -> int:
    return (20 + 25 * min(model.devices, 40)) * max(1, plays) // 150


def _any_plan(model: Model) -> Pieces:
    """A plan by the exact search for few kinds of devices, or the reason why there is none."""
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
    return found


def _starts(model: Model) -> list[Pieces]:
    """Distinct allowed plans to begin with."""
    found: dict[Pieces, None] = {}
    sweep = Sweep(model)
    swept = sweep.best(WIDTH if model.devices <= FEW else WIDTH // 2, PROBES, TOLERANCE)
    if swept is not None:
        found[swept] = None
    plain = even(model)
    if model.allowed(plain):
        found[plain] = None
    if model.by_iteration or not found:
        stages = 0
        for order in dict.fromkeys(_orders(model)):
            levelled = level(model, order)
            if levelled is not None:
                found[levelled[1]] = None
            stages += len(order)
            if stages > STAGES_LEVELLED and found:
                break
    return list(found)


def _orders(model: Model) -> Iterator[tuple[int, ...]]:
    """Orders to start from: inventory, near neighbours, fast first, fast last; all, then fewer devices."""
    devices = list(range(model.devices))
    fast = sorted(devices, key=lambda d: (model.work[d][-1], d))
    roomy = sorted(devices, key=lambda d: (-min(model.available[d], 1e300), model.work[d][-1], d))
    near = _near(model, fast)
    count = model.max_stages
    yield _placed(model, [d for d in devices if d in fast[:count]])
    while count:
        for ranked in (near, fast) if model.unlimited else (near, fast, roomy):
            yield _placed(model, ranked[:count])
            yield _placed(model, ranked[:count][::-1])
        count = count - 1 if count <= 4 else count * 3 // 4


def _near(model: Model, fast: list[int]) -> list[int]:
    """From the fastest on, always the device that is nearest for a message of mean size."""
    size = sum(model.output) / model.layers
    chain, rest = [fast[0]], fast[1:]
    while rest:
        a = chain[-1]

        def cost(b: int, a: int = a) -> float:
            way = model.way(a, b)
            return way.latency_s + size * max((way.seconds_per_byte, *(x for _, x in way.shared)))

        nearest = min(rest, key=cost)
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
