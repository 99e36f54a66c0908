"""The heuristic strategy: a good plan in milliseconds to seconds, the same one for the same problem.

``bottleneck``: a narrow beam from the last layer to the first (``quick_beam.py``). ``iteration``: plans for a
few orders of the devices, balanced (both phases of Sky Computing, ``balance.py``), then annealing over orders
and numbers of layers with a counted number of steps. Devices may stay unused, and the result is never worse
than a feasible even split.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from skyctl.errors import UndecidedError
from skyctl.planner.bottleneck import device_subsets
from skyctl.planner.cost_model import CostModel, Placement
from skyctl.planner.heuristic.balance import balance_layers, even_placement, near_neighbours
from skyctl.planner.heuristic.plan_batch import PlanBatch
from skyctl.planner.heuristic.quick_beam import QuickBeam
from skyctl.planner.heuristic.simulated_annealing import (
    MAX_CELLS,
    QUICK_EFFORT,
    SMALL_FLEET_EFFORT,
    anneal,
    best_simulated,
    counted_progress,
)
from skyctl.planner.infeasibility import raise_infeasible
from skyctl.schedule.actions import ONE_F_ONE_B

WIDE_BEAM_DEVICES = 24
"""Up to so many devices the beam is ``BEAM_WIDTH`` wide, above half of that."""
SMALL_FLEET = 8
BEAM_WIDTH = 32
BISECTIONS = 12
TOLERANCE = 3e-4
"""Relative, for the beam's limit."""
STAGES_BALANCED = 400
STARTS_KEPT = 8


def heuristic_placement(model: CostModel, simulations: int = 150, deadline: float = math.inf) -> Placement:
    """A good plan.

    Args:
        simulations: how long to search for ``iteration``, in proportion.
        deadline: when to take the best so far, in seconds of ``time.perf_counter``.

    Raises:
        InfeasibleError: proved that nothing fits.
        UndecidedError: nothing found; there may be a plan all the same.
    """
    plans = _starts(model, deadline) or [_any_plan(model, deadline)]
    if model.by_iteration and model.devices > 1 and model.devices * model.layers <= MAX_CELLS:
        batch = PlanBatch(model)
        cost = batch.cost_s(*batch.encode(plans))
        ranked = [plans[i] for i in cost.argsort(kind="stable")[:STARTS_KEPT]]
        effort = SMALL_FLEET_EFFORT if model.devices <= SMALL_FLEET else QUICK_EFFORT
        count = _steps(model, simulations)
        as_1f1b: list[Placement] = []
        if model.chooses_depth:  # where nothing is gained by depth, 1F1B's simulated costs are more exact
            plain = CostModel(model.problem.model_copy(update={"schedule": ONE_F_ONE_B}))
            count = count if model.devices <= SMALL_FLEET else count // 2
            progress = counted_progress(count, deadline)
            as_1f1b = anneal(PlanBatch(plain), ranked, progress, seed=0, effort=effort)[:STARTS_KEPT]
        annealed = anneal(batch, ranked, counted_progress(count, deadline), seed=0, effort=effort)
        plans = [ranked[0], *annealed, *as_1f1b, *(plan for plan in plans if plan == even_placement(model))]
    return best_simulated(model, plans, deadline)


def _steps(model: CostModel, simulations: int) -> int:
    """How many steps the annealing takes."""
    return (20 + 25 * min(model.devices, 40)) * max(1, simulations) // 150


def _any_plan(model: CostModel, deadline: float) -> Placement:
    """A plan by the exact search over few groups of devices.

    Raises: see ``heuristic_placement``.
    """
    undecided = UndecidedError(
        "no plan that fits in memory was found, and it is not proved that there is none",
        hint="try --strategy optimal with a longer --time-limit",
    )
    if not device_subsets.subsets_are_few(model):
        raise_infeasible(model, proved=False)
        raise undecided
    try:
        placement = device_subsets.placement_within(model, math.inf, deadline=deadline)
    except TimeoutError:
        raise undecided from None
    if placement is None:
        raise_infeasible(model, proved=True)
        raise AssertionError("unreachable")
    return placement


def _starts(model: CostModel, deadline: float) -> list[Placement]:
    """Distinct allowed plans to begin with."""
    starts: dict[Placement, None] = {}
    width = BEAM_WIDTH if model.devices <= WIDE_BEAM_DEVICES else BEAM_WIDTH // 2
    by_beam = QuickBeam(model).best(width, BISECTIONS, TOLERANCE, deadline)
    if by_beam is not None:
        starts[by_beam] = None
    even = even_placement(model)
    if model.is_allowed(even):
        starts[even] = None
    if model.by_iteration or not starts:
        stages = 0
        for order in dict.fromkeys(_orders(model)):
            balanced = balance_layers(model, order)
            if balanced is not None:
                starts[balanced[1]] = None
            stages += len(order)
            if starts and (stages > STAGES_BALANCED or time.perf_counter() > deadline):
                break
    return list(starts)


def _orders(model: CostModel) -> Iterator[tuple[int, ...]]:
    """Orders to start from: inventory, near neighbours, fast first, fast last; all, then fewer devices."""
    devices = list(range(model.devices))
    fast = sorted(devices, key=lambda d: (model.work_s[d][-1], d))
    roomy = sorted(devices, key=lambda d: (-min(model.available_bytes[d], 1e300), model.work_s[d][-1], d))
    near = near_neighbours(model, fast)
    count = model.max_stages
    yield _placed(model, [d for d in devices if d in fast[:count]])
    while count:
        for ranked in (near, fast) if model.unlimited else (near, fast, roomy):
            yield _placed(model, ranked[:count])
            yield _placed(model, ranked[:count][::-1])
        count = count - 1 if count <= 4 else count * 3 // 4


def _placed(model: CostModel, order: Sequence[int]) -> tuple[int, ...]:
    """The order with devices that may be first and last brought there (added where none is in it)."""
    rest = list(order)
    firsts = [d for d in rest if d in model.may_be_first] or sorted(model.may_be_first)
    if not firsts:
        return tuple(rest)
    if rest and rest[0] not in model.may_be_first:
        lead = next((d for d in firsts if d not in model.may_be_last), firsts[0])
        rest = [lead, *(d for d in rest if d != lead)]
    if rest and rest[-1] not in model.may_be_last:
        lasts = [d for d in rest[1:] if d in model.may_be_last] or [
            d for d in sorted(model.may_be_last) if d != rest[0]
        ]
        if lasts:
            rest = [*(d for d in rest if d != lasts[-1]), lasts[-1]]
    return tuple(rest[: model.max_stages]) if rest[-1] in model.may_be_last else tuple(rest)
