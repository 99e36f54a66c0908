"""Plans of several pipelines side by side, and what a plan's record would take on a problem."""

from __future__ import annotations

import math
import time
from typing import NoReturn

from skyctl.errors import InfeasibleError, InputError, UndecidedError
from skyctl.planner.explanation.unused_devices import known_without
from skyctl.planner.hybrid.exact_hybrids import HybridSearch, is_small, search_exactly
from skyctl.planner.hybrid.hybrid_bound import HybridBound, hybrid_bound
from skyctl.planner.hybrid.hybrid_model import HybridModel
from skyctl.planner.hybrid.hybrid_search import search_hybrids
from skyctl.planner.hybrid.set_bound import set_bound_s
from skyctl.planner.plan_record import make_certificate, make_plan
from skyctl.planner.requirements import require_consistent
from skyctl.planner.stage_memory import human_bytes
from skyctl.planner.verification.proofs.hybrid_bound_proof import are_prices_enough
from skyctl.planner.verification.step import CheckedStep
from skyctl.records.plan import Certificate, Plan, Strategy, Witness
from skyctl.records.problem import Problem

BOUND_MARGIN = 1e-9
"""Relative: left off a bound by sets, whose sums ``verify`` rounds in another order."""
PAIR_S = 2e-5
"""About the seconds that the bound by prices takes for each pair of devices, with the proof of it."""
START_SHARE, SEARCH_SHARE = 0.2, 0.75
"""Of the time, until when a start is looked for where every hybrid is looked at after it, and until when any
search goes on; what is left is for the bound."""


def plan_hybrid(problem: Problem, strategy: Strategy, time_limit_s: float) -> Plan:
    """A plan of two pipelines or more, ``heuristic`` or ``optimal``.

    Raises:
        InputError: another strategy; or the problem asks for what hybrids do not have.
        InfeasibleError: proved that no two pipelines fit.
        UndecidedError: none was found, and it is not proved that there is none.
    """
    if strategy not in ("heuristic", "optimal"):
        raise InputError(
            f"strategy {strategy!r} is of one pipeline or of devices that hold all layers each; a hybrid is "
            "searched for",
            hint="--strategy heuristic or optimal; or --parallel pipeline",
        )
    require_consistent(problem)
    began = time.perf_counter()
    model = HybridModel(problem)
    raise_if_hopeless(model)
    search = _search(model, strategy, began, time_limit_s)
    bound = None
    if strategy == "optimal" and not search.complete:
        bound = _bound_by_prices(model, began + time_limit_s)
    if search.best is None:
        _raise_none(proved=search.complete or (bound is not None and math.isinf(bound.bound_s)))
    unbounded = strategy == "optimal" and not search.complete and bound is None
    proof = make_certificate(
        search.best.iteration_s,
        None,
        proved=strategy == "optimal" and search.complete,
        method=f"{search.method}; bound by prices left out for lack of time" if unbounded else search.method,
        wall_s=time.perf_counter() - began,
    )
    if bound is not None:
        proof = _bounded(problem, proof, bound)
        proof = _bounded_by_sets(proof, set_bound_s(model, proof.value_s, began + time_limit_s))
    claim = known_without(proof)
    return make_plan(model, strategy, search.best, proof, lambda d: _no_room(model, d) or claim)


def _bound_by_prices(model: HybridModel, deadline: float) -> HybridBound | None:
    """The bound; None: there are too many devices to look at all lines in what is left of the time."""
    if model.devices**2 * PAIR_S > deadline - time.perf_counter():
        return None
    return hybrid_bound(model.problem, deadline, model.links)


def _raise_none(*, proved: bool) -> NoReturn:
    """Raises InfeasibleError, or UndecidedError where it is not proved that no two pipelines fit."""
    if proved:
        raise InfeasibleError(
            "no two pipelines fit: every way to cut the layers over two sets of devices lacks memory, or "
            "pins and ties forbid it",
            hint="--parallel pipeline holds the layers once",
        )
    raise UndecidedError(
        "no two pipelines that fit in memory were found, and it is not proved that there are none",
        hint="--parallel pipeline holds the layers once; or more time (--time-limit)",
    )


def _bounded(problem: Problem, proof: Certificate, bound: HybridBound) -> Certificate:
    """The certificate with a bound by prices of layers, where these prove it to ``verify``; else as it is."""
    if not 0 < bound.bound_s <= proof.value_s:
        return proof
    witness = Witness(layer_prices=bound.layer_prices)
    if not are_prices_enough(CheckedStep(problem), bound.bound_s, witness):
        return proof
    method = f"{proof.method}; bound by prices of layers"
    certificate = make_certificate(
        proof.value_s, bound.bound_s, proved=False, method=method, wall_s=proof.wall_s
    )
    return certificate.model_copy(update={"witness": witness})


def _bounded_by_sets(proof: Certificate, bound_s: float) -> Certificate:
    """The certificate with a bound by sets of devices, where that is above the one it has."""
    if bound_s * (1 - BOUND_MARGIN) <= (proof.lower_bound_s or 0.0):
        return proof
    proved = bound_s >= proof.value_s
    method = f"{proof.method.partition('; bound')[0]}; bound by sets of devices"
    low_s = None if proved else bound_s * (1 - BOUND_MARGIN)
    return make_certificate(proof.value_s, low_s, proved=proved, method=method, wall_s=proof.wall_s)


def _search(model: HybridModel, strategy: Strategy, began: float, time_limit_s: float) -> HybridSearch:
    if strategy == "heuristic":
        search = search_hybrids(model, began + time_limit_s)
        if search.best is not None or not is_small(model):
            return search
        return search_exactly(model, None, began + time_limit_s)
    deadline = began + SEARCH_SHARE * time_limit_s
    if not is_small(model):
        return search_hybrids(model, deadline)
    start = search_hybrids(model, began + START_SHARE * time_limit_s, quick=True)
    return search_exactly(model, start.best, deadline)


def raise_if_hopeless(model: HybridModel) -> None:
    """Raises InfeasibleError where two pipelines can't be: devices, microbatches, pins, memory in all."""
    if model.microbatches < 2:
        raise InfeasibleError(
            "two pipelines need two microbatches a step, it has 1",
            hint="--microbatches 2 or more; or --parallel pipeline",
        )
    if model.devices < 2:
        raise InfeasibleError("two pipelines need two devices, the problem has 1", hint="--parallel pipeline")
    for allowed, end in ((model.base.may_be_first, "first"), (model.base.may_be_last, "last")):
        if len(allowed) < 2:
            names = ", ".join(model.ids[d] for d in sorted(allowed)) or "none"
            raise InfeasibleError(
                f"two pipelines need two devices that may hold the {end} layer; the pins allow {names}",
                hint=f"allow more devices there (--pin-{end}); or --parallel pipeline",
            )
    need, room = 2 * model.base.state_bytes[-1], sum(model.base.available_bytes)
    if need > room:
        raise InfeasibleError(
            f"two pipelines hold every layer twice, which needs {human_bytes(need)}; all devices have "
            f"{human_bytes(max(0.0, room))} together",
            hint="--parallel pipeline holds the layers once",
        )


def _no_room(model: HybridModel, device: int) -> str | None:
    """The memory that the device lacks for the smallest layer, in words; None: one fits."""
    least = min(model.base.need_bytes(i, i + 1, 1) for i in range(model.layers))
    room = model.base.available_bytes[device]
    if least <= room:
        return None
    has = human_bytes(max(0.0, room))
    return f"no layer fits: the smallest needs {human_bytes(least)}, it has {has} left"
