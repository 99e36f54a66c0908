"""How a placement is executed, what a search returns, and what a plan costs: simulated, or bounded below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, product
from typing import NamedTuple

from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.records.plan import Witness
from skyctl.schedule.simulation import SimulatedStep, last_backward_ends
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import BoundaryTimes, StageTimes


class StageExecution(NamedTuple):
    """How stages run, one entry per stage.

    Attributes:
        in_flight: microbatches kept between forward and backward.
        deferred: by how many microbatches weight gradients follow the backward (``zero-bubble``).
        recompute: whether it keeps only its layers' inputs and computes activations again in the backward.
    """

    in_flight: tuple[int, ...]
    deferred: tuple[int, ...]
    recompute: tuple[bool, ...]

    @classmethod
    def plain(cls, in_flight: Sequence[int]) -> StageExecution:
        """With these numbers in flight; nothing is deferred or recomputed."""
        return cls(tuple(in_flight), (0,) * len(in_flight), (False,) * len(in_flight))


NO_EXECUTION = StageExecution((), (), ())


@dataclass(frozen=True)
class SearchResult:
    """The best plan found and what is proved of it, both in seconds of the problem's objective.

    ``bound_s`` None: no bound is claimed. ``proved``: no plan is better by more than 1e-9, relative. An empty
    placement that is proved: no plan fits. ``witness``: prices that prove the bound, where prices do.
    """

    placement: Placement
    execution: StageExecution
    value_s: float
    bound_s: float | None
    proved: bool
    method: str
    witness: Witness | None = None


class BoundKind(Enum):
    """Proofs of a lower bound on the slowest stage; the values are how a certificate's method names it."""

    VOLUME = "volume"
    PRICES = "prices"
    PRICES_BY_PLACE = "prices by place"
    EDGES = "periodic edges (exact)"
    EDGES_BY_CP_SAT = "periodic edges (exact, CP-SAT)"
    CP_SAT = "CP-SAT"

    @property
    def by_prices(self) -> bool:
        """Whether dual prices prove it, so that other prices may prove a little less."""
        return self in (BoundKind.PRICES, BoundKind.PRICES_BY_PLACE)


def simulation_input(model: CostModel, placement: Placement, execution: StageExecution) -> SimulationInput:
    """The simulator's input for one step of a candidate plan."""
    seconds = (model.forward_s, model.backward_s, model.optimizer_s, model.weight_s)
    overheads_s = [model.stage_overhead_s(*stage) for stage in placement]
    columns = zip(*(sums.of(placement) for sums in seconds), overheads_s, execution.recompute, strict=True)
    return SimulationInput(
        schedule=model.schedule,
        microbatches=model.microbatches,
        in_flight=execution.in_flight,
        deferred_weights=execution.deferred,
        stages=tuple(
            StageTimes(f + h, b + f + h, o) if recompute else StageTimes(f + h, b + h, o, min(w, b))
            for f, b, o, w, h, recompute in columns
        ),
        boundaries=tuple(
            BoundaryTimes(
                model.message_times(a.device, b.device, a.stop),
                model.message_times(b.device, a.device, a.stop),
            )
            for a, b in pairwise(placement)
        ),
        overhead_s=tuple(model.message_overhead_s(*stage) for stage in placement),
    )


def stage_works_s(model: CostModel, placement: Placement, execution: StageExecution) -> list[float]:
    """Seconds of one microbatch's forward and backward by stage, recomputation included, overhead not."""
    work = model.work_s.of(placement)
    if any(execution.recompute):
        forward = model.forward_s.of(placement)
        work = [w + f if r else w for w, f, r in zip(work, forward, execution.recompute, strict=True)]
    return work


def bottleneck_s(model: CostModel, placement: Placement, execution: StageExecution | None = None) -> float:
    """Seconds of the slowest stage's forward and backward; without ``execution`` nothing is recomputed."""
    works = model.work_s.of(placement) if execution is None else stage_works_s(model, placement, execution)
    return max(works)


def simulate_step(
    model: CostModel, placement: Placement, execution: StageExecution, trace: bool = False
) -> SimulatedStep:
    """Simulates one step of a candidate plan; ``trace``: with every action's start and end."""
    return simulation_input(model, placement, execution).simulate(trace=trace)


def step_s(model: CostModel, placement: Placement, execution: StageExecution) -> float:
    """Seconds of one step; by the simulator's fast path where no resource is shared."""
    optimizer = model.optimizer_s
    done = stage_ends_s(model, placement, execution)
    return max(at + optimizer[d][q] - optimizer[d][p] for at, (d, p, q) in zip(done, placement, strict=True))


def stage_ends_s(model: CostModel, placement: Placement, execution: StageExecution) -> list[float]:
    """By stage, when its last action but the optimizer ends, in seconds from the step's beginning."""
    links = [
        (a.stop, model.link_cost(a.device, b.device), model.link_cost(b.device, a.device))
        for a, b in pairwise(placement)
    ]
    if any(ahead.shared or back.shared for _, ahead, back in links):
        return list(simulate_step(model, placement, execution).ended_s)
    size = model.output_bytes
    forward = model.forward_s.of(placement)
    backward = model.backward_s.of(placement)
    if any(execution.recompute):
        backward = [b + f if r else b for f, b, r in zip(forward, backward, execution.recompute, strict=True)]
    if model.has_overhead:
        overhead = [model.stage_overhead_s(*stage) for stage in placement]
        forward = [f + h for f, h in zip(forward, overhead, strict=True)]
        backward = [b + h for b, h in zip(backward, overhead, strict=True)]
    weight = None
    if model.defers_weights:
        weights = zip(model.weight_s.of(placement), backward, execution.recompute, strict=True)
        weight = [0.0 if r else min(b, w) for w, b, r in weights]
    return last_backward_ends(
        model.microbatches,
        execution.in_flight,
        forward,
        backward,
        ahead=[(size[cut - 1] * link.seconds_per_byte, link.latency_s) for cut, link, _ in links],
        back=[(size[cut - 1] * link.seconds_per_byte, link.latency_s) for cut, _, link in links],
        weight_s=weight,
        deferred_weights=execution.deferred if model.defers_weights else None,
    )


def objective_s(model: CostModel, placement: Placement, execution: StageExecution) -> float:
    """Seconds of the problem's objective: the step, or the slowest stage."""
    measure = step_s if model.by_iteration else bottleneck_s
    return measure(model, placement, execution)


def least_execution(model: CostModel, placement: Placement) -> StageExecution:
    """The fewest microbatches in flight; stages recompute only where they would not fit otherwise."""
    count = len(placement)
    in_flight = tuple(model.least_in_flight(s, count) for s in range(count))
    recompute = (False,) * count
    if model.may_recompute:
        recompute = tuple(
            not model.fits(*stage, k, recompute=False) for stage, k in zip(placement, in_flight, strict=True)
        )
    return StageExecution(in_flight, (0,) * count, recompute)


def recompute_choices(
    model: CostModel, placement: Placement, base: StageExecution, below_s: float
) -> Iterator[StageExecution]:
    """Ways to run a placement in which more stages recompute than must, where the step may be below a limit.

    More work can shorten a step only where it changes who goes first: where messages over two boundaries, or
    both ways over one, pass the same resource.
    """
    passed = Counter(
        resource
        for a, b in pairwise(placement)
        for cost in (model.link_cost(a.device, b.device), model.link_cost(b.device, a.device))
        for resource, _ in cost.shared
    )
    if not model.may_recompute or max(passed.values(), default=0) < 2:
        return
    works_s = stage_works_s(model, placement, base._replace(recompute=(True,) * len(placement)))
    choices = []
    for stage, k, must, work_s in zip(placement, base.in_flight, base.recompute, works_s, strict=True):
        busy_s = model.microbatches * (work_s + 2 * model.stage_overhead_s(*stage))
        may = busy_s < below_s and model.fits(*stage, k, recompute=True)
        choices.append((must, True) if may and not must else (must,))
    for recompute in product(*choices):
        if recompute != base.recompute:
            yield base._replace(recompute=recompute)


def most_in_flight(model: CostModel, placement: Placement) -> tuple[int, ...]:
    """By stage, the most microbatches its memory allows, and no more than the previous stage has."""
    out: list[int] = []
    for s, stage in enumerate(placement):
        low = model.least_in_flight(s, len(placement))
        out.append(most_that_fits(model, stage, low, max(low, out[-1] if out else model.microbatches)))
    return tuple(out)


def most_that_fits(
    model: CostModel, stage: StageAssignment, low: int, high: int, recompute: bool | None = None
) -> int:
    """The most microbatches in flight that fit a stage, from ``low`` (assumed to fit) to ``high``."""
    while low < high:
        middle = (low + high + 1) // 2
        if model.fits(*stage, middle, 0, recompute):
            low = middle
        else:
            high = middle - 1
    return low


def step_lower_bound_s(model: CostModel, placement: Placement) -> float:
    """A lower bound on the step's seconds, whatever in-flight numbers are allowed: paths through the step.

    For every stage: fill up to it, all its own work with the wait for its first gradient, drain after it,
    optimizers. For every link: fill, all its messages, the way back. For every shared resource: all that
    must pass it. Deferred weight gradients are on no path but their own stage's, and stages count as not
    recomputing.
    """
    count = len(placement)
    m = model.microbatches
    if model.chooses_depth:
        most = most_in_flight(model, placement)
    else:
        most = least_execution(model, placement).in_flight
    overhead = [model.stage_overhead_s(*stage) for stage in placement]
    f = [forward + h for forward, h in zip(model.forward_s.of(placement), overhead, strict=True)]
    b = [backward + h for backward, h in zip(model.backward_s.of(placement), overhead, strict=True)]
    o = model.optimizer_s.of(placement)
    w = [0.0] * count
    if model.defers_weights:
        w = model.weight_s.of(placement)
        b = [max(0.0, whole - part) for whole, part in zip(b, w, strict=True)]
    messages = [
        (model.occupancy_s(x.device, y.device, x.stop), model.occupancy_s(y.device, x.device, x.stop))
        for x, y in pairwise(placement)
    ]
    end = 0.0  # of the last backward, counted from the start of the stage's first forward
    round_trip = 0.0  # one microbatch, from there through all later stages and back, this stage included
    out = 0.0
    for s in range(count - 1, -1, -1):
        beyond = 0.0
        through = 0.0
        if s < count - 1:
            (ahead_s, ahead_latency), (back_s, back_latency) = messages[s]
            beyond = ahead_s + ahead_latency + round_trip + back_s + back_latency
            through = f[s] + b[s] + ahead_latency + back_latency
            through = max(
                through + ahead_s + back_s + end,
                through + (m - 1) * max(ahead_s, back_s) + ahead_s + back_s + round_trip,
            )
        end = max(least_span_s(m, most[s], f[s], b[s], beyond), through)
        round_trip = f[s] + b[s] + beyond
        fill = sum(f[j] + messages[j][0][0] + messages[j][0][1] for j in range(s))
        last = end + w[s]
        if w[s]:  # deferred until any time after their backward, but not before the first one
            last = max(last, m * (f[s] + b[s] + w[s]) + max(0.0, beyond - (most[s] - 1) * f[s]))
        out = max(out, fill + last + o[s])
    return max(out, _busiest_shared_s(model, placement))


def least_span_s(m: int, in_flight: int, forward: float, backward: float, beyond: float) -> float:
    """Least seconds from a stage's first forward's start to its last backward's end.

    ``beyond``: what one microbatch takes from its forward's end there until its gradient arrives. Three
    paths: all its work with the wait for the first gradient; the same with the wait for the last one; and
    turn after turn where ``in_flight`` microbatches do not cover ``beyond``.
    """
    wait = max(0.0, beyond - (in_flight - 1) * forward)
    if m > in_flight:
        own = m * forward + (m - in_flight + 1) * backward + wait + max(beyond, (in_flight - 1) * backward)
    else:
        own = m * forward + max(m * backward + wait, backward + beyond)
    turns = -(-m // in_flight)
    rest = m - 1 - (turns - 1) * in_flight
    return max(own, turns * (forward + backward + beyond) + rest * backward)


def _busiest_shared_s(model: CostModel, placement: Placement) -> float:
    """Seconds that all messages of a step occupy the busiest shared resource."""
    load: dict[int, float] = {}
    for a, b in pairwise(placement):
        size = model.output_bytes[a.stop - 1]
        for cost in (model.link_cost(a.device, b.device), model.link_cost(b.device, a.device)):
            for number, rate in cost.shared:
                load[number] = load.get(number, 0.0) + model.microbatches * rate * size
    return max(load.values(), default=0.0)
