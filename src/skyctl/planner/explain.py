"""What a plan's numbers mean: loads, link times, and what binds. Pure functions over a plan record."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from skyctl.planner import memory
from skyctl.planner.model import Model
from skyctl.planner.verification.verify import grid
from skyctl.records.plan import Plan

TIGHT = 0.95
"""Memory used from this share on is called tight."""


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
    largest = max(model.busy_s(*piece) for piece in pieces)
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
        stage_s = model.busy_s(d, p, q)
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
                memory_share=need / device.memory_bytes if device.memory_bytes else None,
            )
        )
    return tuple(views)


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
    tight = [
        v
        for s, v in enumerate(views)
        if s != slowest and v.memory_share is not None and v.memory_share >= TIGHT and v.load < TIGHT
    ]
    if found.kind == "device" and tight:
        full = max(tight, key=lambda v: v.memory_share or 0.0)
        detail = f"{full.device} is {full.memory_share:.0%} full and only {full.load:.0%} loaded"
        return Binding("memory", full.device, detail)
    return found


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
