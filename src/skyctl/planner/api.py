"""The planner's face: plan, assigned, predict, verify. Pure: no I/O, no mutation, no clock but the limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import get_args

from skyctl.errors import InputError
from skyctl.planner.assemble import certificate, make_plan, prediction, require_allowed
from skyctl.planner.depths import LITTLE, refined, value_s
from skyctl.planner.evaluate import least_running
from skyctl.planner.found import Found
from skyctl.planner.grid import grid
from skyctl.planner.heuristic.even import even
from skyctl.planner.model import Model, Piece
from skyctl.planner.steady import steadied
from skyctl.planner.verification.verify import Check, Verdict, verify
from skyctl.records.plan import Plan, Prediction, Strategy
from skyctl.records.problem import Problem

__all__ = ["Check", "Verdict", "assigned", "plan", "predict", "verify"]

EXACT = 1e-12
STRATEGIES = tuple(name for name in get_args(Strategy) if name != "assigned")


def plan(
    problem: Problem,
    strategy: str = "optimal",
    time_limit_s: float = 30.0,
    *,
    assign: Sequence[tuple[str, int, int]] | None = None,
) -> Plan:
    """A plan for ``problem``.

    Args:
        strategy: ``even``, ``heuristic`` or ``optimal``.
        time_limit_s: for ``optimal``: when to stop and hand out the best plan with its bound.
        assign: a plan of the user's own, (device, start, stop) in pipeline order; ``strategy`` is ignored.

    Raises:
        InputError: an unknown strategy, or an assignment that does not cover the layers.
        InfeasibleError: proved that nothing fits (``even`` and ``assign``: that this does not).
        UndecidedError: nothing found in time, nothing proved.
    """
    if assign is not None:
        return assigned(problem, assign)
    began = time.perf_counter()
    model = Model(problem)
    if strategy == "even":
        pieces = even(model)
        require_allowed(model, pieces, least_running(model, pieces), "an even split")
        return _stated(model, "even", pieces, "equal layer counts", began)
    if strategy == "heuristic":
        from skyctl.planner.recompute import good_plan

        return _stated(model, "heuristic", good_plan(model), "allocate by memory, level, local search", began)
    if strategy == "optimal":
        from skyctl.planner.optimal import optimal
        from skyctl.planner.recompute import best

        return _proved(model, (best if model.mixed else optimal)(model, time_limit_s), began)
    raise InputError(f"unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}")


def assigned(problem: Problem, assignment: Sequence[tuple[str, int, int]]) -> Plan:
    """The plan a user has written: (device, start, stop) in pipeline order, half-open.

    Raises:
        InputError: unknown or repeated device, an empty range, a gap, an overlap, layers left over.
        InfeasibleError: a device's memory or a pin does not allow it.
    """
    began = time.perf_counter()
    model = Model(problem)
    known = ", ".join(model.ids)
    pieces: list[Piece] = []
    at = 0
    for device, start, stop in assignment:
        if device not in model.ids:
            raise InputError(f"the assignment names device {device!r}, the problem has: {known}")
        if any(model.index(device) == piece.device for piece in pieces):
            raise InputError(f"the assignment gives {device!r} more than one range; a device holds one stage")
        if stop <= start:
            raise InputError(f"the assignment gives {device!r} the empty range [{start}, {stop})")
        if start != at:
            raise InputError(
                f"the assignment's range of {device!r} starts at layer {start}, it must start at {at}",
                hint="ranges are half-open and follow each other: n1=0:5,n2=5:12",
            )
        pieces.append(Piece(model.index(device), start, stop))
        at = stop
    if at != model.layers:
        raise InputError(f"the assignment covers {at} layers, the problem has {model.layers}")
    require_allowed(model, pieces, least_running(model, pieces), "the assignment")
    return _stated(model, "assigned", tuple(pieces), "as assigned", began)


def predict(problem: Problem, plan: Plan) -> Prediction:
    """What ``plan`` would take on ``problem`` (its own problem, or other numbers for the same devices).

    Raises:
        InputError: the plan names devices the problem lacks, covers other layers, or has several replicas a
            stage.
    """
    model = Model(problem)
    return prediction(model, *grid(model, plan))


def _stated(model: Model, strategy: Strategy, pieces: tuple[Piece, ...], method: str, began: float) -> Plan:
    """A plan that claims no bound."""
    value, running = steadied(model, pieces, *refined(model, pieces, *value_s(model, pieces)))
    wall_s = time.perf_counter() - began
    proof = certificate(value, None, proved=False, method=method, wall_s=wall_s)
    return make_plan(model, strategy, pieces, running, proof)


def _proved(model: Model, found: Found, began: float) -> Plan:
    """With the certificate of a search. Where depths are the plan's choice, the stages' are chosen last."""
    little = EXACT if found.proved else LITTLE
    value, running = refined(model, found.pieces, found.value_s, found.running, little=little)
    value, running = steadied(model, found.pieces, value, running)
    proof = certificate(
        value,
        found.bound_s,
        proved=found.proved,
        method=found.method,
        wall_s=time.perf_counter() - began,
    )
    return make_plan(model, "optimal", found.pieces, running, proof)
