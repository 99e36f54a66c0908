"""A plan record as the simulator is given it."""

from __future__ import annotations

from itertools import pairwise

from skyctl.planner.model import Model, Piece
from skyctl.records.plan import Plan, Stage
from skyctl.records.problem import Problem
from skyctl.schedule.actions import ZERO_BUBBLE
from skyctl.schedule.playing import Play
from skyctl.schedule.simulate import Boundary, StageTimes


def play_of(plan: Plan) -> Play:
    """What the plan's own prediction comes from. Takes a plan with one replica a stage, as launched."""
    problem = plan.problem
    model = Model(problem)
    pieces = [Piece(model.index(stage.replicas[0].device), stage.start, stage.stop) for stage in plan.stages]
    columns = (sums.of(pieces) for sums in (model.forward, model.backward, model.optimizer))
    stages = []
    for stage, (forward_s, backward_s, optimizer_s) in zip(
        plan.stages, zip(*columns, strict=True), strict=True
    ):
        beside_s = model.handling[model.index(stage.replicas[0].device)]
        if stage.replicas[0].recompute:
            stages.append(StageTimes(forward_s + beside_s, backward_s + forward_s + beside_s, optimizer_s))
        else:
            weight_s = min(backward_s, _weight_s(problem, stage))
            stages.append(StageTimes(forward_s + beside_s, backward_s + beside_s, optimizer_s, weight_s))
    return Play(
        schedule=problem.schedule,
        microbatches=problem.microbatches,
        in_flight=tuple(stage.replicas[0].in_flight for stage in plan.stages),
        weights_behind=tuple(stage.replicas[0].weights_behind for stage in plan.stages),
        stages=tuple(stages),
        boundaries=tuple(
            Boundary(model.hop(a.device, b.device, a.stop), model.hop(b.device, a.device, a.stop))
            for a, b in pairwise(pieces)
        ),
    )


def _weight_s(problem: Problem, stage: Stage) -> float:
    """Seconds of a microbatch's weight gradients where the schedule puts them off and they are known."""
    times = problem.times.get(stage.replicas[0].device)
    if problem.schedule != ZERO_BUBBLE or times is None or times.weight_s is None:
        return 0.0
    return sum(times.weight_s[stage.start : stage.stop])
