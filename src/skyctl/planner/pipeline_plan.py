"""Plans of one pipeline, by strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from skyctl.errors import InfeasibleError, InputError
from skyctl.planner.candidate import Candidate, PlannedPipeline
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.evaluation import SearchResult, least_execution
from skyctl.planner.explanation.unused_devices import explain_unused
from skyctl.planner.heuristic.balance import even_placement
from skyctl.planner.infeasibility import require_allowed
from skyctl.planner.optimal_search import good_placement, search_optimal, search_recompute
from skyctl.planner.pipeline_depth import ACCEPTED_SLOWDOWN, add_slack, choose_execution, refine_execution
from skyctl.planner.plan_record import make_certificate, make_plan
from skyctl.planner.step import play
from skyctl.planner.step_costs import StepCosts
from skyctl.planner.tie_exchange import require_ties_at_home, tie_exchange_s
from skyctl.planner.verification.proofs.lower_bound import is_proved_by_witness
from skyctl.records.plan import Plan, Strategy
from skyctl.records.problem import Problem

NO_SLOWDOWN = 1e-12


def plan_pipeline(
    problem: Problem, strategy: Strategy, time_limit_s: float, *, whole_blocks: bool = False
) -> Plan:
    """A plan of one pipeline by any strategy but ``assigned``.

    ``whole_blocks``: the problem's layers are whole transformer blocks.

    Raises:
        InputError: every plan would let the gradients of shared parameters leave the pinned devices.
        InfeasibleError: proved that nothing fits (``even``, ``alone``: that this does not).
        UndecidedError: nothing found in time, nothing proved.
    """
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
        result = _unproved(
            model,
            good_placement(model, deadline=began + time_limit_s),
            "beam search" if not model.by_iteration else "balanced cuts, simulated annealing",
        )
    else:
        search = search_recompute if model.may_recompute else search_optimal
        result = search(model, time_limit_s)
    return _made_plan(model, strategy, result, began, whole_blocks=whole_blocks)


def assigned_pipeline(problem: Problem, assignment: Sequence[tuple[str, int, int]]) -> Plan:
    """The plan of one pipeline that a user has written: (device, start, stop) in pipeline order, half-open.

    Raises:
        InputError: unknown or repeated device, an empty range, a gap, an overlap, layers left over.
        InfeasibleError: a device's memory or a pin does not allow it.
    """
    began = time.perf_counter()
    for item in assignment:
        if not (isinstance(item, tuple | list) and [type(part) for part in item] == [str, int, int]):
            raise InputError(
                f"an assignment is a list of (device, start, stop), not of {item!r}",
                hint='assign=[("n1/cpu:0", 0, 5), ("n2/cpu:0", 5, 12)]',
            )
    require_ties_at_home(problem)
    model = CostModel(problem)
    ids = ", ".join(model.ids)
    stages: list[StageAssignment] = []
    at = 0
    for device, start, stop in assignment:
        if device not in model.ids:
            raise InputError(f"the assignment names device {device!r}, the problem has: {ids}")
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
    """The plan with its certificate. If depths are the plan's choice, the stages get theirs last."""
    placement = result.placement
    costs = StepCosts(model.problem, model)
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
    step = play(costs, Candidate((PlannedPipeline(placement, execution, model.microbatches),)))
    why = explain_unused(model, strategy, placement, proof, whole_blocks=whole_blocks)
    return make_plan(costs, strategy, step, proof, why.__getitem__)
