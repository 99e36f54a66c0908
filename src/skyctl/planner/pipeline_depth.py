"""How deep each stage's pipeline is: microbatches in flight, deferred weight gradients, who recomputes.

Little's law gives the start: a microbatch that is away from a stage for n periods needs n + 1 of them in
flight there. A few such depths are simulated for every candidate (``choose_execution``); for the plan that is
returned a coordinate search follows, and then the least memory that keeps the step within
``ACCEPTED_SLOWDOWN`` (``refine_execution``).

The least depth that keeps a step as short as it can be leaves no slack for a message that comes late: the
previous stage has no forward left to do meanwhile. So the plan is also simulated with slower links, and where
memory allows it the stages before the last get a few microbatches more, as far as that shortens the slower
step and does not lengthen the planned one (``add_slack``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from skyctl.planner.cost_model import CostModel, Placement
from skyctl.planner.evaluation import (
    StageExecution,
    bottleneck_s,
    least_execution,
    most_that_fits,
    objective_s,
    step_s,
)
from skyctl.records.problem import Problem
from skyctl.schedule.steady_state import WHOLE_STEP

T = TypeVar("T")

ACCEPTED_SLOWDOWN = 1e-3
"""Relative: how much longer a step may be for less memory."""
LEAST_GAIN = 1e-9
EXTRA_IN_FLIGHT = (0.0, 1.0, 2.0)
"""Microbatches in flight tried beyond Little's law: stages do not wait for each other evenly."""
ACTIONS = 200_000
"""Forwards and backwards simulated by one coordinate search, about 0.1 s."""
DEPTH_STEPS = (1, 2, 4)
MOST_IN_FLIGHT = 64
"""Microbatches in flight that are tried of a step with more than ``WHOLE_STEP``, or as many as must be."""
LEAST_SAVING_SIMULATIONS = 16
"""Steps simulated at least to save memory."""
SLOWER_LINKS = 1.25
"""How many times longer messages take on the slower links: bandwidth, latency and shared resources."""
MOST_SLACK = 4
"""Microbatches of slack in flight, at most."""
LEAST_SLACK_GAIN = 2e-3
"""Relative: how much shorter the slower step must be for one microbatch more."""
STEP_ROUNDING = 1e-12


def choose_execution(model: CostModel, placement: Placement) -> tuple[float, StageExecution]:
    """An allowed plan's objective in seconds and how its stages run, the best of a few depths."""
    base = least_execution(model, placement)
    if not model.by_iteration:
        return bottleneck_s(model, placement, base), base
    if not model.chooses_depth:
        return step_s(model, placement, base), base
    best: tuple[float, StageExecution] | None = None
    for execution in execution_choices(model, placement, base):
        value = step_s(model, placement, execution)
        if best is None or value < best[0]:
            best = (value, execution)
    assert best is not None
    return best


def execution_choices(model: CostModel, placement: Placement, base: StageExecution) -> list[StageExecution]:
    """How the stages may run: depths to try, the least first."""
    count = len(placement)
    most = _most_each(model, placement, base)
    away = _periods_away(model, placement, base)
    in_flight = [base.in_flight]
    for more in EXTRA_IN_FLIGHT:
        wanted: list[int] = []
        for s in range(count):
            number = math.ceil(away[s] * (1 - 1e-9) + (more if s < count - 1 else 0.0))
            number = max(base.in_flight[s], min(most[s], number))
            wanted.append(min(number, wanted[-1]) if wanted else number)
        in_flight.append(tuple(wanted))
    in_flight.append(most)
    out = [base._replace(in_flight=numbers) for numbers in dict.fromkeys(in_flight)]
    if not model.defers_weights:
        return out
    # ZB-H1: the later a stage, the earlier its last backward, and the more is left to do after it
    later = [_deferred_further(model, placement, execution, tuple(range(count))) for execution in out]
    return list(dict.fromkeys([*out, *later]))


def _most_each(model: CostModel, placement: Placement, base: StageExecution) -> tuple[int, ...]:
    out: list[int] = []
    deepest = model.microbatches if model.microbatches <= WHOLE_STEP else MOST_IN_FLIGHT
    for stage, low, recompute in zip(placement, base.in_flight, base.recompute, strict=True):
        high = max(low, out[-1] if out else deepest)
        out.append(most_that_fits(model, stage, low, high, recompute))
    return tuple(out)


def _periods_away(model: CostModel, placement: Placement, base: StageExecution) -> list[float]:
    """By stage, the time from a forward's start to its backward's end, undisturbed, in periods."""
    recompute = [f if r else 0.0 for f, r in zip(model.forward_s.of(placement), base.recompute, strict=True)]
    overhead = [2 * model.stage_overhead_s(*stage) for stage in placement]
    busy = [sum(parts) for parts in zip(model.work_s.of(placement), recompute, overhead, strict=True)]
    period, round_trip, round_trips = max(busy), 0.0, [0.0] * len(placement)
    for s in range(len(placement) - 1, -1, -1):
        round_trip += busy[s]
        round_trips[s] = round_trip
        if s:
            a, b = placement[s - 1], placement[s]
            for x, y in ((a.device, b.device), (b.device, a.device)):
                seconds, latency_s = model.occupancy_s(x, y, a.stop)
                period = max(period, seconds)
                round_trip += seconds + latency_s
    if period <= 0:
        return [1.0] * len(placement)
    return [min(x / period, float(model.microbatches)) for x in round_trips]


def _deferred_further(
    model: CostModel, placement: Placement, execution: StageExecution, wanted: Sequence[int]
) -> StageExecution:
    """With weight gradients deferred by the wanted numbers, as far as memory allows it."""
    deferred = []
    for (d, p, q), k, recompute, number in zip(
        placement, execution.in_flight, execution.recompute, wanted, strict=True
    ):
        number = 0 if recompute else min(number, model.microbatches - 1)  # noqa: PLW2901
        while number and not model.fits(d, p, q, k, number, False):
            number -= 1  # noqa: PLW2901
        deferred.append(number)
    return execution._replace(deferred=tuple(deferred))


def refine_execution(
    model: CostModel,
    placement: Placement,
    value: float,
    execution: StageExecution,
    *,
    simulations: int | None = None,
    slowdown: float = ACCEPTED_SLOWDOWN,
) -> tuple[float, StageExecution]:
    """A better way to run the same stages, by coordinate search; then one that needs less memory.

    Args:
        value, execution: from ``choose_execution``.
        simulations: how many steps to simulate (default: what ``ACTIONS`` allows).
        slowdown: how much longer a step may be for less memory, relative; 0: memory is not saved.
    """
    if not (model.chooses_depth and model.by_iteration) and not any(execution.recompute):
        return value, execution
    if simulations is None:
        simulations = ACTIONS // (2 * model.microbatches * len(placement))
    search = _ExecutionSearch(model, placement, value, execution, simulations)
    search.climb()
    search.save(slowdown)
    return search.value, search.execution


class _ExecutionSearch:
    """One plan's coordinate search. ``simulations``: left to simulate."""

    def __init__(
        self,
        model: CostModel,
        placement: Placement,
        value: float,
        execution: StageExecution,
        simulations: int,
    ) -> None:
        self.model = model
        self.placement = placement
        self.value, self.execution = value, execution
        self.simulations = simulations
        self.least = least_execution(model, placement).in_flight
        self.values: dict[StageExecution, float] = {execution: value}

    def _value_s(self, execution: StageExecution) -> float:
        if execution not in self.values:
            self.simulations -= 1
            self.values[execution] = objective_s(self.model, self.placement, execution)
        return self.values[execution]

    def _allowed(self, execution: StageExecution) -> bool:
        return all(
            0 < k <= self.model.microbatches
            and 0 <= deferred < max(1, self.model.microbatches)
            and not (recompute and deferred)
            and self.model.fits(d, p, q, k, deferred, recompute)
            for (d, p, q), k, deferred, recompute in zip(self.placement, *execution, strict=True)
        )

    def climb(self) -> None:
        """First improvement over ``_near`` until none is left or the simulations are used up."""
        improved = True
        while improved and self.simulations > 0:
            improved = False
            for other in self._near():
                if self.simulations <= 0:
                    return
                if other in self.values or not self._allowed(other):
                    continue
                value = self._value_s(other)
                if value < self.value * (1 - LEAST_GAIN):
                    self.value, self.execution, improved = value, other, True
                    break

    def _near(self) -> Iterator[StageExecution]:
        execution, count = self.execution, len(self.placement)
        if self.model.may_recompute:
            for s in range(count):
                recompute = _with_value(execution.recompute, s, not execution.recompute[s])
                yield execution._replace(recompute=recompute, deferred=_with_value(execution.deferred, s, 0))
        if not (self.model.chooses_depth and self.model.by_iteration):
            return
        for step in DEPTH_STEPS:
            for s in range(count):
                yield self._deeper(s, step)
                yield self._shallower(s, step)
                if s:
                    yield self._all_deeper(s, step)
            if self.model.defers_weights:
                for s in range(count):
                    for deferred in (execution.deferred[s] + step, execution.deferred[s] - step):
                        yield execution._replace(
                            deferred=_with_value(execution.deferred, s, max(0, deferred))
                        )
                yield execution._replace(deferred=tuple(max(0, x - step) for x in execution.deferred))
                yield _deferred_further(
                    self.model, self.placement, execution, [x + step for x in execution.deferred]
                )

    def _deeper(self, s: int, step: int) -> StageExecution:
        number = min(self.execution.in_flight[s] + step, self.model.microbatches)
        before = (max(k, number) for k in self.execution.in_flight[: s + 1])
        return self.execution._replace(in_flight=(*before, *self.execution.in_flight[s + 1 :]))

    def _all_deeper(self, s: int, step: int) -> StageExecution:
        """All stages up to s with more in flight."""
        more = (min(k + step, self.model.microbatches) for k in self.execution.in_flight[: s + 1])
        return self.execution._replace(in_flight=(*more, *self.execution.in_flight[s + 1 :]))

    def _shallower(self, s: int, step: int) -> StageExecution:
        number = self.execution.in_flight[s] - step
        after = (
            max(least, min(k, number))
            for k, least in zip(self.execution.in_flight[s:], self.least[s:], strict=True)
        )
        return self.execution._replace(in_flight=(*self.execution.in_flight[:s], *after))

    def save(self, slowdown: float) -> None:
        """Fewer in flight, less deferred and nothing recomputed where the step stays within ``slowdown``."""
        if not slowdown:
            return
        limit = self.value * (1 + slowdown)
        self.simulations = max(self.simulations, LEAST_SAVING_SIMULATIONS)
        for s, recompute in enumerate(self.execution.recompute):
            if recompute:
                self._take(
                    self.execution._replace(recompute=_with_value(self.execution.recompute, s, False)), limit
                )
        start = self.execution
        for share in (0.0, 0.25, 0.5, 0.75):
            if self._take(self._less(start, share), limit):
                break
        for s in range(len(self.placement) - 1, -1, -1):
            after = self.execution.in_flight[s + 1] if s + 1 < len(self.placement) else 1
            self._fewest(s, "in_flight", max(self.least[s], after), limit)
            self._fewest(s, "deferred", 0, limit)

    def _less(self, start: StageExecution, share: float) -> StageExecution:
        in_flight = (a + math.ceil(share * (k - a)) for a, k in zip(self.least, start.in_flight, strict=True))
        return start._replace(
            in_flight=tuple(in_flight), deferred=tuple(int(share * x) for x in start.deferred)
        )

    def _take(self, execution: StageExecution, limit: float) -> bool:
        if execution == self.execution:
            return True
        if not self._allowed(execution) or (self.simulations <= 0 and execution not in self.values):
            return False
        value = self._value_s(execution)
        if value > limit:
            return False
        self.value, self.execution = value, execution
        return True

    def _fewest(self, s: int, field: str, least: int, limit: float) -> None:
        """Lowers one stage's number (``field``) as far as the limit allows, by bisection."""
        low, high = least, getattr(self.execution, field)[s]
        while low < high:
            middle = (low + high) // 2
            numbers = _with_value(getattr(self.execution, field), s, middle)
            if self._take(self.execution._replace(**{field: numbers}), limit):
                high = middle
            else:
                low = middle + 1


def _with_value(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def add_slack(
    model: CostModel, placement: Placement, value: float, execution: StageExecution
) -> tuple[float, StageExecution]:
    """The step in seconds and how the stages run, with slack in depth where that is free, else as given.

    Args:
        value: the planned step in seconds; the one returned is no longer.
    """
    linked = model.problem.links or model.problem.shared
    if not (model.chooses_depth and model.by_iteration and linked and len(placement) > 1):
        return value, execution
    slower = CostModel(_with_slower_links(model.problem))
    best = execution
    late_s = step_s(slower, placement, execution)
    for more in range(1, MOST_SLACK + 1):
        deeper = _deeper(model, placement, execution, more)
        if deeper == best or step_s(model, placement, deeper) > value * (1 + STEP_ROUNDING):
            break
        deeper_s = step_s(slower, placement, deeper)
        if deeper_s > late_s * (1 - LEAST_SLACK_GAIN):
            continue
        best, late_s = deeper, deeper_s
    return step_s(model, placement, best), best


def _deeper(model: CostModel, placement: Placement, execution: StageExecution, more: int) -> StageExecution:
    """All stages but the last with ``more`` in flight, as far as memory and microbatches allow."""
    in_flight: list[int] = []
    for (d, p, q), k, deferred, recompute in zip(placement, *execution, strict=True):
        last = len(in_flight) + 1 == len(placement)
        number = k if last else min(k + more, model.microbatches)
        while number > k and not model.fits(d, p, q, number, deferred, recompute):
            number -= 1
        in_flight.append(min(number, in_flight[-1]) if in_flight else number)
    return execution._replace(in_flight=tuple(in_flight))


def _with_slower_links(problem: Problem) -> Problem:
    links = (
        link.model_copy(
            update={
                "latency_s": link.latency_s * SLOWER_LINKS,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s / SLOWER_LINKS,
            }
        )
        for link in problem.links
    )
    shared = (
        resource.model_copy(update={"bandwidth_bytes_per_s": resource.bandwidth_bytes_per_s / SLOWER_LINKS})
        for resource in problem.shared
    )
    return problem.model_copy(update={"links": tuple(links), "shared": tuple(shared)})
