"""The optimal strategy: a good start, then the objective's own search; what it can't prove it bounds.

If stages may recompute their activations (memory for time, decided stage by stage), three ordinary problems
stand in. One is without recomputation, in one every stage recomputes, and their *relaxation* has the times
of the first and the memory of the second. No plan is better or needs less than the relaxation, so
its bound holds for all plans, and where nothing fits there, nothing fits at all. If its best plan fits
without recomputing, that is the answer. Else plans of all three are starts for a descent in which a stage
recomputes where it would not fit otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise, product

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.planner.bottleneck.least_bottleneck import least_bottleneck
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.evaluation import (
    NO_EXECUTION,
    SearchResult,
    bottleneck_s,
    least_execution,
)
from skyctl.planner.heuristic.balance import balance_layers
from skyctl.planner.heuristic.heuristic_plan import heuristic_placement
from skyctl.planner.infeasibility import raise_infeasible
from skyctl.planner.iteration import relaxation
from skyctl.planner.iteration.least_iteration import BestFirstSearch, least_iteration, time_share
from skyctl.planner.local_search import first_improvement, neighbours
from skyctl.planner.pipeline_depth import choose_execution
from skyctl.planner.stage_memory import kept_bytes
from skyctl.records.problem import LayerTimes, Link, Problem

MAX_CELLS_FOR_HEURISTIC_START = 2_000
"""Devices × layers up to which ``bottleneck`` starts from the heuristic's plan; for more it finds its own."""
MAX_CELLS_TO_COMPARE = 200_000
"""Up to this, what is not proved is compared with the heuristic's plan; beyond, that takes seconds."""
PROVED = 1e-9
"""Relative, how near the relaxation's bound a plan's value is when it counts as proved."""
BOUND_MARGIN = 1e-6
RELAXATION_S = 1.0
"""Seconds that the tables of a bound with deferred weight gradients may take."""
RELAXED_SHARE, RELAXED_SHARE_ROOMY = 0.4, 0.8
"""Share of the time for the relaxation; the second where its plan seems to fit without recomputing."""
HEURISTIC_SHARE = 0.75
"""Share of the time left that the heuristic may take, if it is so slow, before the search itself."""
MAX_DESCENT_CANDIDATES = 3000
"""Candidates that a descent without a deadline looks at."""
_NOT_FOUND = (
    "no plan that fits in memory was found, with stages recomputing or not, "
    "and it is not proved that there is none"
)
_SMALLER = "smaller microbatches, or a device with more memory"


def search_optimal(model: CostModel, time_limit_s: float) -> SearchResult:
    """The best plan of a problem whose stages do not recompute, and its proof.

    Raises:
        InfeasibleError: proved that nothing fits.
        UndecidedError: out of time with no plan and no proof.
    """
    deadline = time.perf_counter() + time_limit_s
    if model.by_iteration:
        result = least_iteration(model, _heuristic_start(model, deadline), deadline)
    else:
        result = _search_bottleneck(model, deadline)
    if result is None:
        raise UndecidedError(
            f"no plan was found within {time_limit_s:g} s, and it is not proved that there is none",
            hint="give --time-limit more seconds",
        )
    if not result.placement:
        raise_infeasible(model, proved=True)
    return result


def _heuristic_start(model: CostModel, deadline: float) -> Placement | None:
    try:
        return heuristic_placement(model, deadline=time_share(HEURISTIC_SHARE, deadline))
    except UndecidedError:
        return None


def _search_bottleneck(model: CostModel, deadline: float) -> SearchResult | None:
    size = model.devices * model.layers
    start = _heuristic_start(model, deadline) if size <= MAX_CELLS_FOR_HEURISTIC_START else None
    best, bound, proved, method, witness = least_bottleneck(model, start, deadline)
    if size > MAX_CELLS_FOR_HEURISTIC_START and not proved and (best is None or size <= MAX_CELLS_TO_COMPARE):
        plans = [plan for plan in (best, _heuristic_start(model, deadline)) if plan is not None]
        best = min(plans, key=lambda plan: bottleneck_s(model, plan), default=None)
    if best is None:
        return SearchResult((), NO_EXECUTION, bound, bound, True, method) if proved else None
    value_s = bottleneck_s(model, best)
    return SearchResult(best, least_execution(model, best), value_s, bound, proved, method, witness)


def without_recompute(problem: Problem) -> Problem:
    """The problem in which no stage recomputes."""
    return problem.model_copy(update={"recompute": False})


def with_full_recompute(problem: Problem) -> Problem:
    """The problem in which every stage recomputes: a backward follows another forward, only inputs are kept.

    No weight gradients are deferred then.
    """
    layers = tuple(
        layer.model_copy(
            update={
                "activation_bytes": kept,
                "workspace_bytes": layer.activation_bytes + layer.workspace_bytes,
                "deferred_bytes": 0.0,
            }
        )
        for layer, kept in zip(problem.layers, kept_bytes(problem.layers), strict=True)
    )
    times = {}
    for device in problem.devices:
        layer_times = problem.times.get(device.id)
        if layer_times is None:
            seconds = [layer.flops / device.flops_per_s for layer in problem.layers]
            layer_times = LayerTimes(
                forward_s=tuple(x / 3 for x in seconds),
                backward_s=tuple(x - x / 3 for x in seconds),
                optimizer_s=(0.0,) * len(seconds),
            )
        both = zip(layer_times.forward_s, layer_times.backward_s, strict=True)
        times[device.id] = layer_times.model_copy(
            update={"backward_s": tuple(f + b for f, b in both), "weight_s": None}
        )
    return problem.model_copy(update={"recompute": False, "layers": layers, "times": times})


def recompute_relaxation(problem: Problem) -> Problem:
    """The times of no recomputation with the memory of full recomputation (but not its workspace).

    Shared resources count as limits of each link by itself: where messages queue for one, less work elsewhere
    may make a step longer.
    """
    layers = tuple(
        layer.model_copy(update={"activation_bytes": kept, "deferred_bytes": 0.0})
        for layer, kept in zip(problem.layers, kept_bytes(problem.layers), strict=True)
    )
    links = {(link.source, link.target): link for link in problem.links}
    for resource in problem.shared:
        for source, target in resource.links:
            link = links.get((source, target))
            rate = resource.bandwidth_bytes_per_s
            if link is None:
                links[source, target] = Link(
                    source=source, target=target, latency_s=0.0, bandwidth_bytes_per_s=rate
                )
            elif rate < link.bandwidth_bytes_per_s:
                links[source, target] = link.model_copy(update={"bandwidth_bytes_per_s": rate})
    changed = {"recompute": False, "layers": layers, "links": tuple(links.values()), "shared": ()}
    return problem.model_copy(update=changed)


def good_placement(model: CostModel, simulations: int = 150, deadline: float = math.inf) -> Placement:
    """The heuristic's plan, whether stages may recompute or not, or the best so far at the deadline.

    Raises: see ``good_recompute_placement``.
    """
    if model.may_recompute:
        return good_recompute_placement(model, deadline)
    return heuristic_placement(model, simulations, deadline)


def good_recompute_placement(model: CostModel, deadline: float) -> Placement:
    """The heuristic's plan where stages may recompute.

    Raises:
        InfeasibleError: proved that nothing fits, however stages run.
        UndecidedError: nothing found; there may be a plan all the same.
    """
    first = heuristic_placement(
        CostModel(recompute_relaxation(model.problem), model.links), deadline=deadline
    )
    if _fits_without_recompute(model, first):
        return first
    ordinary = _ordinary_placements(model.problem, lambda base: heuristic_placement(base, deadline=deadline))
    looked = count()
    return _descend(
        model,
        _allowed(model, [first, *ordinary]),
        lambda: next(looked) >= MAX_DESCENT_CANDIDATES or time.perf_counter() > deadline,
    )


def search_recompute(model: CostModel, time_limit_s: float) -> SearchResult:
    """The best plan found where stages may recompute, with a bound on all of them.

    Raises:
        InfeasibleError: proved that nothing fits, however stages run.
        UndecidedError: out of time with no plan and no proof.
    """
    began = time.perf_counter()
    deadline = began + time_limit_s
    if _always_fits(model):
        # nobody recomputes then, unless messages queue and a step is shorter so
        queues = model.by_iteration and bool(model.problem.shared)
        return search_optimal(
            model if queues else CostModel(without_recompute(model.problem), model.links), time_limit_s
        )
    if model.by_iteration and not model.defers_weights and relaxation.relaxation_fits(model, time_limit_s):
        return _exact(model, deadline)
    loose = CostModel(recompute_relaxation(model.problem), model.links)
    share = RELAXED_SHARE
    try:
        start = heuristic_placement(loose, deadline=time_share(HEURISTIC_SHARE, deadline))
        if _fits_without_recompute(model, start):
            share = RELAXED_SHARE_ROOMY
        relaxed = search_optimal(loose, share * time_limit_s)
    except UndecidedError:
        relaxed = None
    if relaxed is not None and _fits_without_recompute(model, relaxed.placement):
        return _bounded_result(model, relaxed.placement, relaxed, relaxed.method)

    def limited(ordinary: CostModel) -> Placement:
        return search_optimal(ordinary, (deadline - time.perf_counter()) / 3).placement

    starts = [relaxed.placement] if relaxed is not None else []
    starts += _ordinary_placements(model.problem, limited)
    placement = _descend(model, _allowed(model, starts), lambda: time.perf_counter() > deadline)
    method = "best found of plans whose stages may recompute"
    if relaxed is None or relaxed.bound_s is None:
        return _bounded_result(model, placement, None, method)
    if model.defers_weights and model.by_iteration and relaxation.relaxation_fits(model, RELAXATION_S):
        low = relaxation.deferred_step_bound_s(model) * (1 - BOUND_MARGIN)
        relaxed = replace(relaxed, bound_s=max(relaxed.bound_s, low))
    method += f"; bound: nobody needs to recompute ({relaxed.method})"
    return _bounded_result(model, placement, relaxed, method)


def _exact(model: CostModel, deadline: float) -> SearchResult:
    """For few devices: best first over orders and cuts; which stages recompute follows from them."""
    try:
        start = good_recompute_placement(model, time_share(HEURISTIC_SHARE, deadline))
    except UndecidedError:
        start = None
    result = BestFirstSearch(model, start, deadline).run()
    if not result.placement and result.proved:
        raise_infeasible(CostModel(recompute_relaxation(model.problem), model.links), proved=True)
    if not result.placement:
        raise UndecidedError(_NOT_FOUND, hint=_SMALLER)
    return result


def _bounded_result(
    model: CostModel, placement: Placement, bound: SearchResult | None, method: str
) -> SearchResult:
    """A plan's result with another search's bound; proved where the two meet."""
    value, execution = choose_execution(model, placement)
    low = None if bound is None else bound.bound_s
    proved = bound is not None and low is not None and bound.proved and value <= low * (1 + PROVED)
    return SearchResult(placement, execution, value, low, proved, method)


def _always_fits(model: CostModel) -> bool:
    """Whether every device could hold all layers, with all microbatches in flight."""
    m = model.microbatches
    most = model.need_bytes(0, model.layers, m, m - 1) + 2 * model.receive_window * max(model.output_bytes)
    return all(most <= room for room in model.available_bytes)


def _fits_without_recompute(model: CostModel, placement: Placement) -> bool:
    """Whether all these stages fit without recomputing."""
    execution = least_execution(model, placement)
    return model.is_allowed(placement) and not any(execution.recompute)


def _ordinary_placements(problem: Problem, search: Callable[[CostModel], Placement]) -> list[Placement]:
    """The plans found where no stage and where every stage recomputes."""
    out = []
    for ordinary in (without_recompute(problem), with_full_recompute(problem)):
        try:
            out.append(search(CostModel(ordinary)))
        except (InfeasibleError, UndecidedError):
            continue
    return out


def _allowed(model: CostModel, starts: Sequence[Placement]) -> list[Placement]:
    """Those that fit, stages recomputing where needed, and balanced cuts for the same orders of devices."""
    out = [placement for placement in starts if model.is_allowed(placement)]
    for placement in starts:
        balanced = balance_layers(model, [stage.device for stage in placement])
        if balanced is not None:
            out.append(balanced[1])
    if not out:
        raise UndecidedError(_NOT_FOUND, hint=_SMALLER)
    return list(dict.fromkeys(out))


def _descend(model: CostModel, starts: Sequence[Placement], is_over: Callable[[], bool]) -> Placement:
    """From the best start to better plans: neighbours, stages given up and stages cut in two."""

    def candidates(placement: Placement) -> list[Placement]:
        return [*neighbours(placement), *_merged_stages(placement), *_split_stages(model, placement)]

    value, placement = min((choose_execution(model, start)[0], start) for start in starts)
    return first_improvement(model, placement, value, candidates, is_over)[0]


def _merged_stages(placement: Placement) -> list[Placement]:
    """Each boundary's two stages on either of their devices alone."""
    out = []
    for s, (a, b) in enumerate(pairwise(placement)):
        for device in (a.device, b.device):
            out.append((*placement[:s], StageAssignment(device, a.start, b.stop), *placement[s + 2 :]))
    return out


def _split_stages(model: CostModel, placement: Placement) -> list[Placement]:
    """1, 2, 4, … of each stage's first or last layers on an unused device."""
    used = {stage.device for stage in placement}
    unused = [device for device in range(model.devices) if device not in used]
    out: list[Placement] = []
    for s, (device, p, q) in enumerate(placement):
        sizes = [1 << i for i in range((q - p - 1).bit_length())]
        for other, size in product(unused, sizes):
            first = StageAssignment(other, p, p + size), StageAssignment(device, p + size, q)
            last = StageAssignment(device, p, q - size), StageAssignment(other, q - size, q)
            out += [(*placement[:s], *both, *placement[s + 1 :]) for both in (first, last)]
    return out
