"""What a plan's numbers mean: loads, link times, and what binds. Pure functions over a plan record."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from skyctl.planner import memory
from skyctl.planner.assemble import spans
from skyctl.planner.grid import grid
from skyctl.planner.model import Model
from skyctl.records.plan import Plan

BUSY = 0.95
"""A stage with this share of the largest stage's work is not held back by its memory."""


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
    pieces, flying = grid(model, plan)
    busy_s = spans(model, model.work, pieces)
    largest = max(busy_s)
    views = []
    for s, (d, p, q) in enumerate(pieces):
        device = plan.problem.devices[d]
        need = memory.device_bytes(plan.problem, device, p, q, flying[s])
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
    """The device, link or shared resource that is busy longest, or the memory that holds layers back."""
    model = Model(plan.problem)
    views = stages(plan)
    slowest = max(range(len(views)), key=lambda s: views[s].stage_s)
    m = plan.problem.microbatches
    loads: list[tuple[float, Binding]] = []
    view = views[slowest]
    detail = (
        f"{m} microbatches keep it busy for {m * view.stage_s:.3g} s of {plan.predicted.iteration_s:.3g} s"
    )
    loads.append((view.stage_s, Binding("device", view.device, detail)))
    if model.by_iteration:
        loads += _links(model, plan)
    _, found = max(loads, key=lambda load: load[0])
    full = [views[s] for s in _held_back(model, plan) if s != slowest and views[s].load < BUSY]
    if found.kind == "device" and full:
        least = min(full, key=lambda v: v.load)
        detail = (
            f"no further layer fits in its memory ({least.memory_share:.0%} full), "
            f"and its load is {least.load:.0%} of {view.device}'s"
        )
        return Binding("memory", least.device, detail)
    return found


def _held_back(model: Model, plan: Plan) -> list[int]:
    """The stages whose devices have no memory for one more layer of a neighbour."""
    pieces, flying = grid(model, plan)
    return [
        s
        for s, (d, p, q) in enumerate(pieces)
        if len(pieces) > 1
        and not (p > 0 and model.fits(d, p - 1, q, flying[s]))
        and not (q < model.layers and model.fits(d, p, q + 1, flying[s]))
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
