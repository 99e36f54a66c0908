"""The planner's interface: plan, assigned, predict, verify. Pure: no I/O, and no clock but the time limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, get_args

from skyctl.errors import InputError
from skyctl.planner.data.data_plan import assigned_data, plan_data
from skyctl.planner.hybrid.hybrid_plan import plan_hybrid
from skyctl.planner.pipeline_plan import assigned_pipeline, plan_pipeline
from skyctl.planner.plan_record import read_candidate
from skyctl.planner.requirements import require_consistent
from skyctl.planner.rounds.round_plan import assigned_rounds, plan_rounds
from skyctl.planner.step import play, predict_step
from skyctl.planner.step_costs import StepCosts
from skyctl.planner.transformer_blocks import plan_whole_blocks
from skyctl.planner.verification.verdict import Check, Verdict
from skyctl.planner.verification.verification import verify
from skyctl.records.base import require_record
from skyctl.records.plan import Plan, Prediction, Strategy
from skyctl.records.problem import Problem

__all__ = ["Check", "Verdict", "assigned", "plan", "predict", "verify"]

DATA = "data"
"""A problem's ``parallel`` that asks for devices which hold all layers each."""
HYBRID = "hybrid"
"""One that asks for several pipelines, each with cuts of its own."""
STRATEGIES = tuple(name for name in get_args(Strategy) if name != "assigned")


def plan(
    problem: Problem,
    strategy: str | None = None,
    time_limit_s: float = 30.0,
    *,
    assign: Sequence[tuple[str, int, int]] | Sequence[tuple[str, int]] | None = None,
    whole_blocks: bool = False,
) -> Plan:
    """A plan for ``problem``: one pipeline, or by its ``parallel`` devices that hold all layers each, or
    several pipelines (``hybrid``: ``heuristic`` and ``optimal`` only).

    Args:
        strategy: ``even``, ``alone`` (the fastest device that holds it all), ``heuristic`` or ``optimal``
            (the default).
        time_limit_s: when to stop and return the best plan, with its bound if ``optimal``.
        assign: a plan of the user's own, (device, start, stop) in pipeline order, or with ``parallel`` "data"
            (device, microbatches); without ``strategy`` and ``whole_blocks``.
        whole_blocks: only look at plans that cut between transformer blocks (known by the layers' names).

    Raises:
        InputError: no problem, an unknown strategy, a time limit that is none, an assignment that does not
            cover the layers or comes with a strategy, or layers whose names do not say which block they
            belong to.
        InfeasibleError: proved that nothing fits (``even``, ``alone`` and ``assign``: that this does not).
        UndecidedError: nothing found in time, nothing proved.
    """
    require_record(problem, Problem, "plan")
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, int | float) or not time_limit_s >= 0:
        raise InputError(f"time_limit_s must be a number of seconds, 0 or more, not {time_limit_s!r}")
    if problem.parallel == DATA and whole_blocks:
        raise InputError(
            "whole_blocks says where to cut, and where every device holds all layers nothing is cut"
        )
    if problem.parallel == HYBRID and whole_blocks:
        raise InputError("whole_blocks is for one pipeline", hint="--parallel pipeline")
    if assign is not None:
        for name, is_given in (("strategy", strategy is not None), ("whole_blocks", whole_blocks)):
            if is_given:
                raise InputError(
                    f"{name} does not go with assign: your own plan is taken as it is",
                    hint=f"leave {name} out, or assign",
                )
        return assigned(problem, assign)
    searched = "optimal" if strategy is None else strategy
    if whole_blocks:
        return plan_whole_blocks(
            problem, lambda coarse: _plan(coarse, searched, time_limit_s, whole_blocks=True)
        )
    return _plan(problem, searched, time_limit_s)


def _plan(problem: Problem, strategy: str, time_limit_s: float, *, whole_blocks: bool = False) -> Plan:
    """A plan by one strategy; ``whole_blocks``: the problem's layers are whole transformer blocks."""
    if strategy not in STRATEGIES:
        raise InputError(f"unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
    require_consistent(problem)
    if problem.rhythm.is_rounds:
        return plan_rounds(problem, cast("Strategy", strategy), time_limit_s)
    if problem.parallel == DATA:
        return plan_data(problem, cast("Strategy", strategy), time_limit_s)
    if problem.parallel == HYBRID:
        return plan_hybrid(problem, cast("Strategy", strategy), time_limit_s)
    return plan_pipeline(problem, cast("Strategy", strategy), time_limit_s, whole_blocks=whole_blocks)


def assigned(
    problem: Problem, assignment: Sequence[tuple[str, int, int]] | Sequence[tuple[str, int]]
) -> Plan:
    """The plan a user has written: (device, start, stop) in pipeline order, half-open.

    If every device holds all layers (``parallel`` "data"), each entry is (device, microbatches).

    Raises:
        InputError: ``parallel`` is "hybrid"; unknown or repeated device, an empty range, a gap, an overlap,
            layers left over.
        InfeasibleError: a device's memory or a pin does not allow it.
    """
    require_consistent(problem)
    if problem.rhythm.is_rounds:
        return assigned_rounds(problem, cast("Sequence[tuple[str, int]]", assignment))
    if problem.parallel == DATA:
        return assigned_data(problem, cast("Sequence[tuple[str, int]]", assignment))
    if problem.parallel == HYBRID:
        raise InputError(
            "an assignment is of one pipeline, or of devices that hold all layers each; the problem asks for "
            "several pipelines",
            hint="--parallel pipeline or data goes with --assign",
        )
    return assigned_pipeline(problem, cast("Sequence[tuple[str, int, int]]", assignment))


def predict(problem: Problem, plan: Plan) -> Prediction:
    """The predicted step of ``plan`` on ``problem`` (its own problem, or other numbers for the same devices).

    Raises:
        InputError: no problem or no plan; the plan names devices the problem lacks, or covers other layers
            or microbatches.
    """
    require_record(problem, Problem, "predict")
    require_record(plan, Plan, "predict")
    require_consistent(problem)
    costs = StepCosts(problem)
    return predict_step(costs, play(costs, read_candidate(costs, plan)))
