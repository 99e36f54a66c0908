"""Objective ``iteration``: exact for few devices; for more, the best plan found and a bound.

Exact is a best-first search over orders and cuts. A node fixes the first stages and which devices hold the
rest; its bound is the longest path through its stages with the relaxation of the rest (``relaxation.py``). A
node that is a whole plan is simulated. The least bound left in the heap is valid whenever the search stops.
"""

from __future__ import annotations

import heapq
import itertools
import time

import numpy as np

from skyctl.planner.bottleneck.least_bottleneck import least_bottleneck
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.evaluation import (
    NO_EXECUTION,
    SearchResult,
    StageExecution,
    recompute_choices,
    step_lower_bound_s,
    step_s,
)
from skyctl.planner.heuristic.simulated_annealing import improve_until
from skyctl.planner.iteration import relaxation, round_trip_bound
from skyctl.planner.iteration.relaxation import Array, Relaxation, least_spans_s
from skyctl.planner.pipeline_depth import choose_execution, refine_execution

EXACT_ENOUGH = 1e-11
"""Relative: a bound this close to the best value can't hide a better plan but for rounding."""
MAX_HEAP = 1_500_000
NEAR = 0.02
"""Plans within this of the best are tried with more depths than a few, where the plan chooses them."""
SIMULATIONS = 60


def interchangeable_devices(model: CostModel) -> list[int]:
    """By device, the lowest index of one that it can be exchanged with without changing any cost."""
    out: list[int] = []
    for d in range(model.devices):
        out.append(next((c for c in range(d) if out[c] == c and _same(model, c, d)), d))
    return out


def _same(model: CostModel, a: int, b: int) -> bool:
    tables = (
        model.forward_s,
        model.backward_s,
        model.optimizer_s,
        model.available_bytes,
        model.overhead_s,
        model.neighbour_overhead_s,
    )
    if any(table[a] != table[b] for table in tables):
        return False
    if (a in model.may_be_first) != (b in model.may_be_first) or (a in model.may_be_last) != (
        b in model.may_be_last
    ):
        return False
    others = (e for e in range(model.devices) if e not in (a, b))
    return model.link_cost(a, b) == model.link_cost(b, a) and all(
        model.link_cost(a, e) == model.link_cost(b, e) and model.link_cost(e, a) == model.link_cost(e, b)
        for e in others
    )


class BestFirstSearch:
    """The exact search for few devices; ``best`` holds the best plan so far."""

    def __init__(self, model: CostModel, start: Placement | None, deadline: float) -> None:
        self.model = model
        self.deadline = deadline
        self.best: tuple[float, Placement, StageExecution] = (float("inf"), (), NO_EXECUTION)
        if start is not None:
            value, execution = choose_execution(model, start)
            self.best = (value, start, execution)
        self.relaxation = Relaxation(model)
        self.twins = interchangeable_devices(model)
        self.heap: list[tuple[float, int, Placement, int, int, int]] = []
        self.count = 0
        self.simulations = 0
        self.floor = float("inf")  # least bound of a whole plan whose best in-flight numbers are not proved

    def run(self) -> SearchResult:
        """Searches until the best plan is proved, or the time or the heap is used up."""
        self._roots()
        stopped = False
        steps = 0
        while self.heap and self.heap[0][0] < self._cut():
            steps += 1
            if (steps & 15 == 0 and time.perf_counter() > self.deadline) or len(self.heap) > MAX_HEAP:
                stopped = True
                break
            bound, _, placement, device, start, subset = heapq.heappop(self.heap)
            if device < 0:
                self._simulate(placement, bound)
            else:
                self._expand(placement, device, start, subset)
        value, placement, execution = self.best
        left = self.heap[0][0] if stopped else value
        bound = min(left, self.floor, value)
        proved = not stopped and self.floor >= self._cut()
        why = "" if proved else (", time out" if stopped else ", not every depth tried")
        method = f"best first over orders and cuts: {self.count} nodes, {self.simulations} simulated{why}"
        return SearchResult(placement, execution, value, value if proved else bound, proved, method)

    def _cut(self) -> float:
        return self.best[0] * (1 - EXACT_ENOUGH)

    def _canonical(self, device: int, subset: int) -> bool:
        """Whether the device is the lowest of its twins in the subset."""
        twin = self.twins[device]
        return not any(subset >> d & 1 and self.twins[d] == twin for d in range(twin, device))

    def _roots(self) -> None:
        model, relaxation = self.model, self.relaxation
        for subset in range(1, 1 << model.devices):
            lacking = any(
                subset >> d & 1 and self.twins[c] == self.twins[d] and not subset >> c & 1
                for d in range(model.devices)
                for c in range(d)
            )
            if lacking:
                continue  # another subset with the lower twins is the same plan
            for d in range(model.devices):
                if subset >> d & 1 and d in model.may_be_first and self._canonical(d, subset):
                    bound = float(relaxation.end[subset][d, 0])
                    if bound < self._cut():
                        self._push(bound, (), d, 0, subset)

    def _push(self, bound: float, placement: Placement, device: int, start: int, subset: int) -> None:
        self.count += 1
        heapq.heappush(self.heap, (bound, self.count, placement, device, start, subset))

    def _simulate(self, placement: Placement, bound: float) -> None:
        self.simulations += 1
        value, execution = choose_execution(self.model, placement)
        if self.model.chooses_depth and value < self.best[0] * (1 + NEAR):
            value, execution = refine_execution(
                self.model, placement, value, execution, simulations=SIMULATIONS, slowdown=0.0
            )
        if not self.model.chooses_depth:
            limit_s = min(value, self.best[0])
            for other in recompute_choices(self.model, placement, execution, limit_s):
                value, execution = min((value, execution), (step_s(self.model, placement, other), other))
        if value < self.best[0]:
            self.best = (value, placement, execution)
        if self.model.chooses_depth:  # depths are not enumerated
            self.floor = min(self.floor, bound)

    def _whole(self, placement: Placement) -> None:
        bound = step_lower_bound_s(self.model, placement)
        if bound < self._cut():
            self._push(bound, placement, -1, 0, 0)

    def _expand(self, placement: Placement, d: int, start: int, subset: int) -> None:
        model, relaxation = self.model, self.relaxation
        rest = subset ^ (1 << d)
        if not rest:
            self._whole((*placement, StageAssignment(d, start, model.layers)))
            return
        stages = subset.bit_count()
        k, least = relaxation.in_flight(stages)
        stops = slice(start + 1, model.layers - stages + 2)
        f, b = relaxation.forward[d][start, stops], relaxation.backwards(d, least)[start, stops]
        o = relaxation.optimizer[d][start, stops]
        barred = relaxation.barred(d, least)[start, stops]
        for e in range(model.devices):
            if not rest >> e & 1 or not self._canonical(e, rest):
                continue
            beyond, after = relaxation.beyond(d, e, relaxation.end[rest][e], relaxation.trip[rest][e])
            beyond, after = beyond[stops], after[stops]
            end = np.maximum(least_spans_s(model.microbatches, k, f, b, beyond), f + b + after)
            bounds = self._through(placement, d, stages, (end, f + b + beyond, o)) + barred
            for i in np.flatnonzero(bounds < self._cut()).tolist():
                stop = start + 1 + i
                self._push(float(bounds[i]), (*placement, StageAssignment(d, start, stop)), e, stop, rest)

    def _through(self, placement: Placement, d: int, stages: int, tail: tuple[Array, Array, Array]) -> Array:
        """The bound with the stages before, given (end, trip, optimizer) of the stage on d, one of
        ``stages`` to the last."""
        end, trip, o = tail
        model, relaxation = self.model, self.relaxation
        total = len(placement)
        fill = self._fill(placement, d)
        out = end + o + fill[total]
        following = d
        for s in range(total - 1, -1, -1):
            a, p, q = placement[s]
            there, back, latency = relaxation.messages[a][following]
            both = float(there[q] + back[q]) + latency
            loaded = both + (model.microbatches - 1) * float(max(there[q], back[q]))
            k, least = relaxation.in_flight(stages + total - s)
            f, b = float(relaxation.forward[a][p, q]), float(relaxation.backwards(a, least)[p, q])
            through = f + b + np.maximum(both + end, loaded + trip)
            beyond = both + trip
            end = np.maximum(least_spans_s(model.microbatches, k, f, b, beyond), through)
            trip = f + b + beyond
            out = np.maximum(out, end + (fill[s] + float(relaxation.optimizer[a][p, q])))
            following = a
        return out

    def _fill(self, placement: Placement, d: int) -> list[float]:
        """When each stage, and the one on d, can start at the earliest."""
        out = [0.0]
        for s, (a, p, q) in enumerate(placement):
            e = placement[s + 1].device if s + 1 < len(placement) else d
            seconds, latency = self.model.occupancy_s(a, e, q)
            out.append(out[-1] + float(self.relaxation.forward[a][p, q]) + seconds + latency)
        return out


SEARCH_SHARE = 0.45
BOUND_SHARE = 0.45
"""Shares of the time left for the search of a plan, and for the bound by trips."""
FEW_S = 2.0
"""Seconds after which the search for few devices finds nothing more."""
BOUND_MARGIN = 1e-6
"""Relative: left off a bound, so that it can be proved by other methods too."""
EXACT_SHARE = 0.7
"""Share of the time for the exact search, where there is one, before bounds are sought otherwise."""


def least_iteration(model: CostModel, start: Placement | None, deadline: float) -> SearchResult | None:
    """The best plan and its bound. ``start``: a plan to begin with.

    None: no plan was found; raises nothing. An empty placement: proved that no plan fits.
    """
    if start is None:
        start, proved, method = _any_plan(model, deadline)
        if start is None:
            return (
                SearchResult((), NO_EXECUTION, float("inf"), float("inf"), True, method) if proved else None
            )
    if not model.defers_weights and relaxation.relaxation_fits(model, deadline - time.perf_counter()):
        result = BestFirstSearch(model, start, time_share(EXACT_SHARE, deadline)).run()
        return result if result.proved else _tightened(model, result, deadline)
    stop = time_share(SEARCH_SHARE, deadline)
    if model.defers_weights and relaxation.relaxation_fits(model, deadline - time.perf_counter()):
        stop = min(stop, time.perf_counter() + FEW_S)
    placement = improve_until(model, start, stop)
    value, execution = choose_execution(model, placement)
    return _tightened(model, SearchResult(placement, execution, value, None, False, "local search"), deadline)


def time_share(share: float, deadline: float) -> float:
    """When that share of the time left until the deadline is over, in seconds of ``time.perf_counter``."""
    now = time.perf_counter()
    return now + share * max(0.0, deadline - now)


def _any_plan(model: CostModel, deadline: float) -> tuple[Placement | None, bool, str]:
    result = least_bottleneck(model, None, time_share(SEARCH_SHARE, deadline))
    return result.placement, result.proved and result.placement is None, result.method


def _tightened(model: CostModel, result: SearchResult, deadline: float) -> SearchResult:
    """With the best of the bounds: its own, by trips, by the largest stage."""
    bounds = [(result.bound_s or 0.0, "")]
    stop = time_share(BOUND_SHARE, deadline)
    slowest = least_bottleneck(model, result.placement, stop)
    by_stage = model.microbatches * slowest.bound_s + _least_optimizer_s(model)
    by_stage = min(by_stage, result.value_s)
    bounds.append((by_stage, f"; bound: microbatches · bottleneck ({slowest.method})"))
    low = max(bound for bound, _ in bounds)
    by_trip = 0.0
    if model.defers_weights:
        if relaxation.relaxation_fits(model, deadline - time.perf_counter()):
            by_paths = relaxation.deferred_step_bound_s(model) * (1 - BOUND_MARGIN)
            bounds.append(
                (min(by_paths, result.value_s), "; bound: paths that weight gradients do not lengthen")
            )
    elif round_trip_bound.round_trip_bound_fits(model) and time.perf_counter() < deadline:
        trips = round_trip_bound.RoundTripBound(model, result.value_s, deadline)
        by_trip = trips.largest(low, result.value_s) * (1 - BOUND_MARGIN)
    if by_trip > low:
        bounds.append((by_trip, "; bound: round trips of a microbatch"))
    bound, words = max(bounds, key=lambda entry: entry[0])
    witness = slowest.witness if bound == by_stage else None
    method = result.method + words
    return SearchResult(result.placement, result.execution, result.value_s, bound, False, method, witness)


def _least_optimizer_s(model: CostModel) -> float:
    return min(b - a for sums in model.optimizer_s for a, b in itertools.pairwise(sums))
