"""What was picked beside the stages, and why, in words: schedule and depths, and who recomputes."""

from __future__ import annotations

from itertools import pairwise

from skyctl.planner import memory
from skyctl.planner.evaluate import least_running
from skyctl.planner.grid import grid
from skyctl.planner.model import Model
from skyctl.records.plan import Plan, Stage

NAMES = {
    "sequential": "sequential",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "eager-1f1b": "eager 1F1B",
    "zero-bubble": "zero-bubble",
}
TELLING = 0.1
"""A link busy for less than this share of the slowest stage's time is no reason for a depth."""
MANY = 12
"""So many stages' depths are listed."""


def picked(plan: Plan) -> list[str]:
    """One line for the schedule, where it let the plan choose, and one for the stages that recompute."""
    return [*_schedule(plan), *_recompute(plan)]


def _schedule(plan: Plan) -> list[str]:
    model = Model(plan.problem)
    if not (model.eager and model.by_iteration) or len(plan.stages) < 2:
        return []
    pieces, running = grid(model, plan)
    said = f"{NAMES[model.schedule]}, in flight {_numbers(running.flying)}"
    if any(running.behind):
        said += f", weight gradients behind {_numbers(running.behind)}"
    slowest = max(model.work.of(pieces))
    least = least_running(model, pieces).flying
    if running.flying == least:
        return [f"{said}: no more than 1F1B keeps"]
    links = []
    for a, b in pairwise(pieces):
        for x, y in ((a.device, b.device), (b.device, a.device)):
            seconds, latency_s = model.occupancy_s(x, y, a.stop)
            links.append((seconds + latency_s, seconds, f"{model.ids[x]} → {model.ids[y]}"))
    taken, busy, name = max(links)
    if slowest <= 0 or taken < TELLING * slowest:
        return [f"{said}, 1F1B {_numbers(least)}: the stages' times differ"]
    how = f"the link {name} takes {busy / slowest:.0%} of the slowest stage's time"
    if busy < TELLING * slowest:
        how = f"a message {name} is under way for {taken / slowest:.0%} of the slowest stage's time"
    return [f"{said}, 1F1B {_numbers(least)}: {how}"]


def _numbers(values: tuple[int, ...]) -> str:
    more = "/…" if len(values) > MANY else ""
    return "/".join(str(x) for x in values[:MANY]) + more


def _recompute(plan: Plan) -> list[str]:
    out = []
    for number, stage in enumerate(plan.stages):
        if stage.replicas[0].recompute:
            out.append(f"stage {number} on {_saved(plan, stage)}")
    if not out:
        return []
    rest = f"; and {len(out) - MANY} more" if len(out) > MANY else ""
    return ["recomputed in the backward: " + "; ".join(out[:MANY]) + rest]


def _saved(plan: Plan, stage: Stage) -> str:
    run = stage.replicas[0]
    device = next(d for d in plan.problem.devices if d.id == run.device)
    with_it, without = (
        memory.device_bytes(plan.problem, device, stage.start, stage.stop, run.in_flight, recompute=again)
        for again in (True, False)
    )
    return f"{run.device} ({memory.human(with_it)} instead of {memory.human(without)})"
