"""Bounds of a step with a parameter server, added up anew from records for ``verify``.

The play that predicts it is not played again. In the long run no step is faster than the slowest worker's
clock with nobody to wait for, and none is slower than all workers' clocks one after the other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from skyctl.planner.verification.reading import ReadPlan
from skyctl.planner.verification.step import CheckedStep
from skyctl.planner.verification.verdict import Check, is_close
from skyctl.records.plan import Plan

PLAYED = 0.02
"""Of a finite play's step, how far it may be above what holds in the long run."""


class StaleStep(NamedTuple):
    """By replica, seconds of a clock on average: its computing, and all of it."""

    compute_s: tuple[float, ...]
    clock_s: tuple[float, ...]


def stale_step(step: CheckedStep, read: ReadPlan) -> StaleStep:
    """The seconds that each replica's clocks take on average; its route's root holds the weights."""
    wires, size = step.sums.wires, math.fsum(step.sums.sizes)
    root = read.groups[0].trees[0].root
    optimizer_s = next(step.optimizer_s(stage) for stage in read.held if step.ids[stage.device] == root)
    compute, clocks = [], []
    for stage in read.held:
        name = step.ids[stage.device]
        uneven = step.devices[name].step_factors or (1.0,)
        compute_s = step.computes_s(stage) * math.fsum(uneven) / len(uneven)
        compute.append(compute_s)
        parts = [compute_s, optimizer_s]
        if name != root:
            parts.append(2 * size * step.devices[root].message_byte_s)
            for edge in ((name, root), (root, name)):
                parts += [size * wires.line_s(edge), wires.latency_s.get(edge, 0.0)]
        clocks.append(math.fsum(parts))
    return StaleStep(tuple(compute), tuple(clocks))


def check_server(plan: Plan, expected: StaleStep) -> list[Check]:
    """Checks which device holds the weights, and whether the predicted step is within its bounds."""
    predicted, first = plan.predicted.stale, plan.pipelines[0].stages[0].device
    roots = [route.root for group in plan.sync.groups for route in group.routes] if plan.sync else []
    server = Check(
        name="server",
        ok=roots == [first],
        detail=f"{first} is to hold the weights, the routes' roots are {', '.join(roots) or 'none'}",
    )
    if predicted is None:
        return [server, Check(name="value", ok=False, detail="it does not say what staleness gains")]
    least_s, most_s = max(expected.clock_s), (1 + PLAYED) * math.fsum(expected.clock_s)
    replicas = [stage.device for stage in plan.placed_stages]
    slowest = replicas[expected.clock_s.index(least_s)]
    unknown = {x.id for x in plan.problem.devices if x.id in replicas and not x.step_factors}
    claimed_s = plan.certificate.value_s
    ok = is_close(claimed_s, plan.predicted.iteration_s) and is_close(predicted.bound_s, least_s)
    ok = ok and least_s * (1 - 1e-9) <= claimed_s <= most_s
    ok = ok and claimed_s * (1 - PLAYED) <= predicted.synchronous_s <= most_s
    ok = ok and set(predicted.unknown) == unknown
    ok = ok and any(
        name == predicted.slowest and is_close(clock_s, least_s)
        for name, clock_s in zip(replicas, expected.clock_s, strict=True)
    )
    detail = f"{claimed_s:.6g} s claimed, {least_s:.6g} s ({slowest}) to {most_s:.6g} s possible"
    return [server, Check(name="value", ok=ok, detail=detail)]
