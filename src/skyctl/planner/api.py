"""The planner's interface: plan, assigned, predict, verify. Pure: no I/O, and no clock but the time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import cast, get_args

from skyctl.errors import InfeasibleError, InputError
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.evaluation import SearchResult, least_execution, read_placement
from skyctl.planner.heuristic.balance import even_placement
from skyctl.planner.pipeline_depth import ACCEPTED_SLOWDOWN, add_slack, choose_execution, refine_execution
from skyctl.planner.plan_record import make_certificate, make_plan, make_prediction, require_allowed
from skyctl.planner.tie_exchange import require_ties_at_home, tie_exchange_s
from skyctl.planner.transformer_blocks import plan_whole_blocks
from skyctl.planner.verification.lower_bound import is_proved_by_witness
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
NO_SLOWDOWN = 1e-12
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
    _require_rhythm(problem)
    _require_no_helpers(problem)
    if problem.rhythm.is_rounds:
        from skyctl.planner.rounds.round_plan import plan_rounds

        return plan_rounds(problem, cast("Strategy", strategy), time_limit_s)
    if problem.parallel == DATA:
        from skyctl.planner.data.data_plan import plan_data

        return plan_data(problem, cast("Strategy", strategy), time_limit_s)
    if problem.parallel == HYBRID:
        from skyctl.planner.hybrid.hybrid_plan import plan_hybrid

        return plan_hybrid(problem, cast("Strategy", strategy), time_limit_s)
    began = time.perf_counter()
    require_ties_at_home(problem)
    model = CostModel(problem)
    if strategy == "even":
        placement = even_placement(model)
        require_allowed(model, placement, least_execution(model, placement), "an even split")
        result = _unproved(model, placement, "equal layer counts")
    elif strategy == "alone":
        result = _fastest_alone(model)
    elif strategy == "heuristic":
        from skyctl.planner.optimal_search import good_placement

        result = _unproved(
            model,
            good_placement(model, deadline=began + time_limit_s),
            "beam search" if not model.by_iteration else "balanced cuts, simulated annealing",
        )
    else:
        from skyctl.planner.optimal_search import search_optimal, search_recompute

        search = search_recompute if model.may_recompute else search_optimal
        result = search(model, time_limit_s)
    return _made_plan(model, cast("Strategy", strategy), result, began, whole_blocks=whole_blocks)


def _require_rhythm(problem: Problem) -> None:
    """Raises InputError where a delay or staleness does not go with the problem's form."""
    rhythm = problem.rhythm
    if rhythm.is_stale and problem.parallel != DATA:
        raise InputError(
            "with staleness one device holds the weights for others that hold all layers as well; parallel "
            f"is {problem.parallel}",
            hint="--parallel data",
        )
    if rhythm.delay and problem.parallel == "pipeline":
        raise InputError(
            "a rhythm says when the gradients that several pipelines sum take effect, and one pipeline sums "
            "none",
            hint="--parallel data or hybrid; or leave --sync-delay out",
        )


def _require_no_helpers(problem: Problem) -> None:
    """Raises InputError where a device of one pipeline's problem is to hold nothing and help to sum."""
    if problem.parallel == "pipeline" and problem.helpers:
        raise InputError(
            f"{problem.helpers[0]} is to help others to sum gradients, and one pipeline sums none",
            hint="--parallel data; or leave the device out of the problem",
        )


def assigned(
    problem: Problem, assignment: Sequence[tuple[str, int, int]] | Sequence[tuple[str, int]]
) -> Plan:
    """The plan a user has written: (device, start, stop) in pipeline order, half-open.

    Where every device holds all layers (``parallel`` "data") it is (device, microbatches).

    Raises:
        InputError: ``parallel`` is "hybrid"; unknown or repeated device, an empty range, a gap, an overlap,
            layers left over.
        InfeasibleError: a device's memory or a pin does not allow it.
    """
    _require_rhythm(problem)
    _require_no_helpers(problem)
    if problem.rhythm.is_rounds:
        from skyctl.planner.rounds.round_plan import assigned_rounds

        return assigned_rounds(problem, cast("Sequence[tuple[str, int]]", assignment))
    if problem.parallel == DATA:
        from skyctl.planner.data.data_plan import assigned_data

        return assigned_data(problem, cast("Sequence[tuple[str, int]]", assignment))
    if problem.parallel == HYBRID:
        raise InputError(
            "an assignment is of one pipeline, or of devices that hold all layers each; the problem asks for "
            "several pipelines",
            hint="--parallel pipeline or data goes with --assign",
        )
    began = time.perf_counter()
    for item in assignment:
        if not (isinstance(item, tuple | list) and [type(part) for part in item] == [str, int, int]):
            raise InputError(
                f"an assignment is a list of (device, start, stop), not of {item!r}",
                hint='assign=[("n1/cpu:0", 0, 5), ("n2/cpu:0", 5, 12)]',
            )
    require_ties_at_home(problem)
    model = CostModel(problem)
    known = ", ".join(model.ids)
    stages: list[StageAssignment] = []
    at = 0
    for device, start, stop in cast("Sequence[tuple[str, int, int]]", assignment):
        if device not in model.ids:
            raise InputError(f"the assignment names device {device!r}, the problem has: {known}")
        if any(model.index(device) == stage.device for stage in stages):
            raise InputError(f"the assignment gives {device!r} more than one range; a device holds one stage")
        if stop <= start:
            raise InputError(f"the assignment gives {device!r} the empty range [{start}, {stop})")
        if start != at:
            raise InputError(
                f"the assignment's range of {device!r} starts at layer {start}, it must start at {at}",
                hint="ranges are half-open and follow each other: n1=0:5,n2=5:12",
            )
        stages.append(StageAssignment(model.index(device), start, stop))
        at = stop
    if at != model.layers:
        raise InputError(f"the assignment covers {at} layers, the problem has {model.layers}")
    placement = tuple(stages)
    require_allowed(model, placement, least_execution(model, placement), "the assignment")
    return _made_plan(model, "assigned", _unproved(model, placement, "as assigned"), began)


def predict(problem: Problem, plan: Plan) -> Prediction:
    """What ``plan`` would take on ``problem`` (its own problem, or other numbers for the same devices).

    Raises:
        InputError: no problem or no plan; the plan names devices the problem lacks, covers other layers, or
            has several pipelines.
    """
    require_record(problem, Problem, "predict")
    require_record(plan, Plan, "predict")
    if problem.rhythm.is_rounds:
        from skyctl.planner.rounds.round_plan import predict_rounds

        return predict_rounds(problem, plan)
    if problem.parallel == DATA:
        from skyctl.planner.data.data_plan import predict_data

        return predict_data(problem, plan)
    if problem.parallel == HYBRID:
        from skyctl.planner.hybrid.hybrid_plan import predict_hybrid

        return predict_hybrid(problem, plan)
    model = CostModel(problem)
    return make_prediction(model, *read_placement(model, plan))


def _unproved(model: CostModel, placement: Placement, method: str) -> SearchResult:
    """A placement that claims no bound."""
    value_s, execution = choose_execution(model, placement)
    return SearchResult(placement, execution, value_s, None, False, method)


def _fastest_alone(model: CostModel) -> SearchResult:
    """All layers on the device that is the fastest with them; it recomputes where they fit no other way.

    Raises:
        InfeasibleError: none can hold them; the one with the most memory is named.
    """
    results: list[SearchResult] = []
    refused: InfeasibleError | None = None
    memory = [math.inf if d.memory_bytes is None else d.memory_bytes for d in model.problem.devices]
    for d in sorted(range(model.devices), key=lambda d: -memory[d]):
        placement = (StageAssignment(d, 0, model.layers),)
        what = "no device can train alone: that"
        try:
            require_allowed(model, placement, least_execution(model, placement), what)
        except InfeasibleError as exc:
            refused = refused or exc
        else:
            results.append(_unproved(model, placement, "the fastest device that holds all layers"))
    if not results:
        assert refused is not None
        raise refused
    return min(results, key=lambda result: result.value_s)


def _made_plan(
    model: CostModel, strategy: Strategy, result: SearchResult, began: float, *, whole_blocks: bool = False
) -> Plan:
    """The plan with its certificate. Where depths are the plan's choice, the stages' are chosen last."""
    placement = result.placement
    slowdown = NO_SLOWDOWN if result.proved else ACCEPTED_SLOWDOWN
    value_s, execution = refine_execution(
        model, placement, result.value_s, result.execution, slowdown=slowdown
    )
    value_s, execution = add_slack(model, placement, value_s, execution)
    bound_s, proved = result.bound_s, result.proved
    if model.by_iteration and (exchange_s := tie_exchange_s(model, placement)):
        # the search has not weighed it, so what is proved of steps without it is a bound of those with it
        bound_s, proved = value_s if proved else bound_s, False
        value_s += exchange_s
    wall_s = time.perf_counter() - began
    proof = make_certificate(value_s, bound_s, proved=proved, method=result.method, wall_s=wall_s)
    if result.witness is not None and is_proved_by_witness(model.problem, proof, result.witness):
        proof = proof.model_copy(update={"witness": result.witness})
    return make_plan(model, strategy, placement, execution, proof, whole_blocks=whole_blocks)
