"""What a plan's numbers mean: loads, link times, and what binds. Pure functions over a plan record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from skyctl.planner.evaluate import play
from skyctl.planner.grid import grid
from skyctl.planner.model import Model
from skyctl.records.plan import Plan

BUSY = 0.95
"""A stage with this share of the largest stage's work is not held back by its memory."""
MOSTLY = 0.6
"""Where even the busiest device works less than this share of the step, it is said what fills the rest."""
NOTHING = 0.005
PLAYED = 100_000
"""Stages × layers, or actions, from which on nothing is played again for that."""


@dataclass(frozen=True)
class StageView:
    """One row of a plan, per microbatch where it says so.

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
class Binding:
    """What keeps the plan from being better. ``kind``: device, link, shared or memory; ``name``: which."""

    kind: str
    name: str
    detail: str


def stages(plan: Plan) -> tuple[StageView, ...]:
    """One view a stage, in pipeline order."""
    model = Model(plan.problem)
    pieces, running = grid(model, plan)
    again = zip(model.work.of(pieces), model.forward.of(pieces), running.recompute, strict=True)
    busy_s = [work + (forward if twice else 0.0) for work, forward, twice in again]
    largest = max(busy_s)
    views = []
    for s, (d, p, q) in enumerate(pieces):
        device = plan.problem.devices[d]
        need = plan.predicted.replicas[s].memory_bytes
        link_s = 0.0
        if s + 1 < len(pieces):
            e = pieces[s + 1].device
            link_s = max(model.occupancy_s(d, e, q)[0], model.occupancy_s(e, d, q)[0])
        step = plan.predicted.iteration_s
        busy = plan.predicted.replicas[s].compute_s / step if step > 0 else 0.0
        stage_s = busy_s[s]
        views.append(
            StageView(
                device=device.id,
                start=p,
                stop=q,
                stage_s=stage_s,
                load=stage_s / largest if largest > 0 else 0.0,
                busy=busy,
                link_s=link_s,
                memory_bytes=need,
                memory_share=_share(need, device.memory_bytes),
            )
        )
    return tuple(views)


def _share(need_bytes: float, memory_bytes: float | None) -> float | None:
    if memory_bytes is None:
        return None
    return need_bytes / memory_bytes if memory_bytes > 0 else 1.0


def binding(plan: Plan) -> Binding:
    """The device, link or shared resource that is busy longest, or the memory that holds layers back.

    Longest in a step, or for ``bottleneck`` with one microbatch, links and optimizer left out.
    """
    model = Model(plan.problem)
    views = stages(plan)
    slowest = max(range(len(views)), key=lambda s: views[s].busy if model.by_iteration else views[s].stage_s)
    view = views[slowest]
    busy_s = plan.predicted.replicas[slowest].compute_s
    detail = f"busy {busy_s:.3g} s of a step's {plan.predicted.iteration_s:.3g} s ({view.busy:.0%})"
    loads = [(busy_s, Binding("device", view.device, detail))]
    if model.by_iteration:
        loads += [(model.microbatches * seconds, found) for seconds, found in _links(model, plan)]
    _, found = max(loads, key=lambda load: load[0])
    full = [views[s] for s in _held_back(model, plan) if s != slowest and views[s].load < BUSY]
    if found.kind == "device" and full:
        least = min(full, key=lambda v: v.load)
        detail = (
            f"no further layer fits in its memory ({least.memory_share:.0%} full), and it is busy for "
            f"{least.busy:.0%} of the step, {view.device} for {view.busy:.0%}"
        )
        found = Binding("memory", least.device, detail)
    rest = _rest(plan, slowest) if _much_is_idle(plan, view) else ""
    return replace(found, detail=found.detail + rest)


def _much_is_idle(plan: Plan, busiest: StageView) -> bool:
    """Whether it needs saying what the busiest device waits for (and that is quickly found out)."""
    size = len(plan.stages) * max(len(plan.problem.layers), 2 * plan.problem.microbatches)
    if size > PLAYED or plan.predicted.iteration_s <= 0 or busiest.busy > 1 - NOTHING:
        return False
    return busiest.busy < MOSTLY or plan.problem.schedule == "sequential"


def _rest(plan: Plan, stage: int) -> str:
    """What the step consists of while its busiest stage does nothing."""
    model = Model(plan.problem)
    pieces, running = grid(model, plan)
    trip_s = sum(
        seconds + latency_s
        for a, b in pairwise(pieces)
        for seconds, latency_s in (
            model.occupancy_s(a.device, b.device, a.stop),
            model.occupancy_s(b.device, a.device, a.stop),
        )
    )
    links = f"; links take {trip_s:.3g} s of each microbatch's way there and back" if trip_s > 0 else ""
    name = model.ids[pieces[stage].device]
    if plan.problem.schedule == "sequential":
        return f"; sequential passes one microbatch at a time: the rest, {name} waits for the others{links}"
    spans_of = [span for span in play(model, pieces, running, trace=True).trace if span.stage == stage]
    work = [span for span in spans_of if span.kind != "O"]
    step_s = plan.predicted.iteration_s
    ends_s = max(span.end_s for span in spans_of)
    fill_s = min(span.start_s for span in work) + step_s - ends_s
    waits_s = max(0.0, step_s - plan.predicted.replicas[stage].compute_s - fill_s)
    return (
        f"; {name} waits {fill_s:.3g} s while the pipeline fills and drains, "
        f"{waits_s:.3g} s in between{links}"
    )


def _held_back(model: Model, plan: Plan) -> list[int]:
    """The stages whose devices have no memory for one more layer of a neighbour."""
    pieces, running = grid(model, plan)
    runs = list(zip(*running, strict=True))
    return [
        s
        for s, (d, p, q) in enumerate(pieces)
        if len(pieces) > 1
        and not (p > 0 and model.fits(d, p - 1, q, *runs[s]))
        and not (q < model.layers and model.fits(d, p, q + 1, *runs[s]))
    ]


def _links(model: Model, plan: Plan) -> list[tuple[float, Binding]]:
    pieces, _ = grid(model, plan)
    out = []
    shared: dict[int, float] = {}
    for a, b in pairwise(pieces):
        for x, y in ((a.device, b.device), (b.device, a.device)):
            hop = model.hop(x, y, a.stop)
            for number, seconds in hop.shared:
                assert isinstance(number, int)
                shared[number] = shared.get(number, 0.0) + seconds
            name = f"{model.ids[x]} → {model.ids[y]}"
            detail = f"each message takes {hop.link_s:.3g} s and {hop.latency_s:.3g} s of latency"
            out.append((hop.link_s, Binding("link", name, detail)))
    for number, seconds in shared.items():
        detail = f"a microbatch's messages hold it for {seconds:.3g} s"
        out.append((seconds, Binding("shared", plan.problem.shared[number].name, detail)))
    return out
