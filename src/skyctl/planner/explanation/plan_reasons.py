"""Why a plan is as it is: its stages' loads, what limits it, and why depths and recomputation were chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from skyctl.planner.cost_model import CostModel, StageAssignment
from skyctl.planner.evaluation import least_execution, simulate_step, stage_works_s
from skyctl.planner.plan_record import read_placement
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.pipeline import PlacedStage
from skyctl.records.plan import Plan

BUSY = 0.95
"""A stage with this share of the largest stage's work is not held back by its memory."""
MOSTLY = 0.6
"""If even the busiest device works less than this share of the step, the reasons explain the rest."""
NOTHING = 0.005
PLAYED = 100_000
"""Stages × layers, or actions, from which on nothing is simulated again for that."""
NAMES = {
    "sequential": "sequential",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "eager-1f1b": "eager 1F1B",
    "zero-bubble": "zero-bubble",
}
TELLING = 0.1
"""A link busy for less than this share of the slowest stage's time is no reason for more depth."""
MANY_LISTED = 12
"""How many stages' depths are listed."""


@dataclass(frozen=True)
class StageView:
    """One stage of a plan in figures, per microbatch where it says so.

    ``load``: its forward and backward over the largest stage's, 0 to 1. ``busy``: its compute over the step.
    ``link_s``: seconds a microbatch's activation occupies the way to the next stage and its gradient the way
    back, the slower of the two (0 for the last). ``memory_share``: None where memory is unlimited.
    """

    device: str
    start: int
    stop: int
    stage_s: float
    load: float
    busy: float
    link_s: float
    memory_bytes: float
    memory_share: float | None


@dataclass(frozen=True)
class BindingConstraint:
    """The resource that keeps the plan from being better, and in words how (``detail``)."""

    kind: Literal["device", "link", "shared", "memory"]
    name: str
    detail: str


def stage_views(plan: Plan) -> tuple[StageView, ...]:
    """All stages in figures, in pipeline order."""
    model = CostModel(plan.problem)
    placement, execution = read_placement(model, plan)
    works_s = stage_works_s(model, placement, execution)
    largest = max(works_s)
    step_s = plan.predicted.iteration_s
    views = []
    for s, ((d, p, q), stage_s, predicted) in enumerate(
        zip(placement, works_s, plan.predicted.replicas, strict=True)
    ):
        device = plan.problem.devices[d]
        link_s = 0.0
        if s + 1 < len(placement):
            e = placement[s + 1].device
            link_s = max(model.occupancy_s(d, e, q)[0], model.occupancy_s(e, d, q)[0])
        views.append(
            StageView(
                device=device.id,
                start=p,
                stop=q,
                stage_s=stage_s,
                load=stage_s / largest if largest > 0 else 0.0,
                busy=predicted.compute_s / step_s if step_s > 0 else 0.0,
                link_s=link_s,
                memory_bytes=predicted.memory_bytes,
                memory_share=_share(predicted.memory_bytes, device.memory_bytes),
            )
        )
    return tuple(views)


def _share(need_bytes: float, memory_bytes: float | None) -> float | None:
    if memory_bytes is None:
        return None
    return need_bytes / memory_bytes if memory_bytes > 0 else 1.0


def find_binding_constraint(plan: Plan) -> BindingConstraint:
    """The device, link or shared resource that is busy longest, or the memory that holds layers back.

    Longest in a step, or for ``bottleneck`` with one microbatch, links and optimizer left out.
    """
    model = CostModel(plan.problem)
    views = stage_views(plan)
    slowest = max(range(len(views)), key=lambda s: views[s].busy if model.by_iteration else views[s].stage_s)
    view = views[slowest]
    busy_s = plan.predicted.replicas[slowest].compute_s
    detail = f"busy {busy_s:.3g} s of a step's {plan.predicted.iteration_s:.3g} s ({view.busy:.0%})"
    loads = [(busy_s, BindingConstraint("device", view.device, detail))]
    if model.by_iteration:
        loads += [
            (model.microbatches * seconds, constraint) for seconds, constraint in _link_loads(model, plan)
        ]
    _, constraint = max(loads, key=lambda load: load[0])
    full = [views[s] for s in _held_back(model, plan) if s != slowest and views[s].load < BUSY]
    if constraint.kind == "device" and full:
        least = min(full, key=lambda v: v.load)
        detail = (
            f"no further layer fits in its memory ({least.memory_share:.0%} full), and it is busy for "
            f"{least.busy:.0%} of the step, {view.device} for {view.busy:.0%}"
        )
        constraint = BindingConstraint("memory", least.device, detail)
    rest = _rest(plan, slowest) if _much_is_idle(plan, view) else ""
    return replace(constraint, detail=constraint.detail + rest)


def _much_is_idle(plan: Plan, busiest: StageView) -> bool:
    """Whether to explain what the busiest device waits for: it often idles, and that is quickly simulated."""
    size = len(plan.placed_stages) * max(len(plan.problem.layers), 2 * plan.problem.microbatches)
    if size > PLAYED or plan.predicted.iteration_s <= 0 or busiest.busy > 1 - NOTHING:
        return False
    return busiest.busy < MOSTLY or plan.problem.schedule == "sequential"


def _rest(plan: Plan, stage: int) -> str:
    """The part of a step in which its busiest stage is idle, explained in words."""
    model = CostModel(plan.problem)
    placement, execution = read_placement(model, plan)
    round_trips_s = sum(
        seconds + latency_s
        for a, b in pairwise(placement)
        for seconds, latency_s in (
            model.occupancy_s(a.device, b.device, a.stop),
            model.occupancy_s(b.device, a.device, a.stop),
        )
    )
    links = (
        f"; links take {round_trips_s:.3g} s of each microbatch's way there and back"
        if round_trips_s > 0
        else ""
    )
    name = model.ids[placement[stage].device]
    if plan.problem.schedule == "sequential":
        return f"; sequential passes one microbatch at a time: the rest, {name} waits for the others{links}"
    spans_of = [
        span for span in simulate_step(model, placement, execution, trace=True).trace if span.stage == stage
    ]
    work = [span for span in spans_of if span.kind != "O"]
    step_s = plan.predicted.iteration_s
    ends_s = max(span.end_s for span in spans_of)
    fill_s = min(span.start_s for span in work) + step_s - ends_s
    waits_s = max(0.0, step_s - plan.predicted.replicas[stage].compute_s - fill_s)
    return (
        f"; {name} waits {fill_s:.3g} s while the pipeline fills and drains, "
        f"{waits_s:.3g} s in between{links}"
    )


def _held_back(model: CostModel, plan: Plan) -> list[int]:
    """The stages whose devices have no memory for one more layer of a neighbour."""
    placement, execution = read_placement(model, plan)
    runs = list(zip(*execution, strict=True))
    return [
        s
        for s, (d, p, q) in enumerate(placement)
        if len(placement) > 1
        and not (p > 0 and model.fits(d, p - 1, q, *runs[s]))
        and not (q < model.layers and model.fits(d, p, q + 1, *runs[s]))
    ]


def _link_loads(model: CostModel, plan: Plan) -> list[tuple[float, BindingConstraint]]:
    placement, _ = read_placement(model, plan)
    out = []
    shared: dict[int, float] = {}
    for a, b in pairwise(placement):
        for x, y in ((a.device, b.device), (b.device, a.device)):
            message = model.message_times(x, y, a.stop)
            for number, seconds in message.shared:
                assert isinstance(number, int)
                shared[number] = shared.get(number, 0.0) + seconds
            name = f"{model.ids[x]} → {model.ids[y]}"
            detail = f"each message takes {message.link_s:.3g} s and {message.latency_s:.3g} s of latency"
            out.append((message.link_s, BindingConstraint("link", name, detail)))
    for number, seconds in shared.items():
        detail = f"a microbatch's messages hold it for {seconds:.3g} s"
        out.append((seconds, BindingConstraint("shared", plan.problem.shared[number].name, detail)))
    return out


def describe_choices(plan: Plan) -> list[str]:
    """In words: a line on the depths, where the schedule leaves them open, and one on recomputing stages."""
    return [*_schedule(plan), *_recompute(plan)]


def _schedule(plan: Plan) -> list[str]:
    model = CostModel(plan.problem)
    if not (model.chooses_depth and model.by_iteration) or len(plan.placed_stages) < 2:
        return []
    placement, execution = read_placement(model, plan)
    words = f"{NAMES[model.schedule]}, in flight {_numbers(execution.in_flight)}"
    if any(execution.deferred):
        words += f", weight gradients behind {_numbers(execution.deferred)}"
    slowest = max(model.work_s.of(placement))
    least = least_execution(model, placement).in_flight
    if execution.in_flight == least:
        return [f"{words}: no more than 1F1B keeps"]
    links = []
    for a, b in pairwise(placement):
        for x, y in ((a.device, b.device), (b.device, a.device)):
            seconds, latency_s = model.occupancy_s(x, y, a.stop)
            links.append((seconds + latency_s, seconds, f"{model.ids[x]} → {model.ids[y]}"))
    taken, busy, name = max(links)
    if slowest <= 0 or taken < TELLING * slowest:
        return [f"{words}, 1F1B {_numbers(least)}: the stages' times differ"]
    how = f"the link {name} takes {busy / slowest:.0%} of the slowest stage's time"
    if busy < TELLING * slowest:
        how = f"a message {name} is under way for {taken / slowest:.0%} of the slowest stage's time"
    return [f"{words}, 1F1B {_numbers(least)}: {how}"]


def _numbers(values: tuple[int, ...]) -> str:
    more = "/…" if len(values) > MANY_LISTED else ""
    return "/".join(str(x) for x in values[:MANY_LISTED]) + more


def _recompute(plan: Plan) -> list[str]:
    out = []
    for number, stage in enumerate(plan.placed_stages):
        if stage.recompute:
            out.append(f"stage {number} on {_saved(plan, stage)}")
    if not out:
        return []
    rest = f"; and {len(out) - MANY_LISTED} more" if len(out) > MANY_LISTED else ""
    return ["recomputed in the backward: " + "; ".join(out[:MANY_LISTED]) + rest]


def _saved(plan: Plan, stage: PlacedStage) -> str:
    model = CostModel(plan.problem)
    held = StageAssignment(model.index(stage.device), stage.start, stage.stop)
    with_it, without = (
        human_bytes(model.device_bytes(held, stage.in_flight, recompute=recompute))
        for recompute in (True, False)
    )
    return f"{stage.device} ({with_it} instead of {without})"
