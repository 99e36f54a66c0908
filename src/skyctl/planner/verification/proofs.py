"""Lower bounds, re-derived for ``verify`` from the problem alone, one method after the other.

Each method answers whether a plan exists below a limit: no (proved), yes, or not known. None imports the
planner's own search, model or evaluation; what is shared with them is the contract itself: the records,
``schedule.actions`` (orders, numbers in flight) and ``schedule.simulate``.
"""

from __future__ import annotations

from collections.abc import Callable

from skyctl.planner.verification import paths, periodic, places, prices, split, subsets, trips
from skyctl.planner.verification.facts import Facts
from skyctl.planner.verification.found import Proof

TOLERANCE = 1e-9
"""Relative: a bound holds where no plan is further below it than that."""

Method = Callable[[Facts, float], Proof]

QUICK: tuple[Method, ...] = (subsets.few, prices.listed, periodic.prove, places.prove)
LONG: tuple[Method, ...] = (subsets.prove, prices.prove)
"""Some seconds each."""


def prove(facts: Facts, bound_s: float) -> Proof:
    """Whether no plan is better than ``bound_s``, in the problem's objective."""
    below_s = bound_s * (1 - TOLERANCE)
    methods = ITERATION if facts.problem.objective == "iteration" else (*QUICK, *LONG)
    if facts.split and facts.problem.objective == "iteration":
        methods = SPLIT
    if below_s <= 0:
        return Proof(True, "nothing is below zero")
    return _first(methods, facts, below_s)


def _first(methods: tuple[Method, ...], facts: Facts, below_s: float) -> Proof:
    """The first answer; where no method knows, all that they said."""
    said = []
    for method in methods:
        found = method(facts, below_s)
        if found.holds is False and facts.loose and method is not paths.prove:
            found = Proof(None, "a better plan would exist if stages recomputed in no time")
        if found.holds is not None:
            return found
        said.append(found.detail)
    return Proof(None, "; ".join(said))


def _volume(facts: Facts, below_s: float, methods: tuple[Method, ...] = QUICK) -> Proof:
    """A step is at least: all microbatches through its slowest stage, and one layer's optimizer."""
    optimizer_s = min(float(facts.columns(d)[2].min()) for d in range(facts.devices))
    stage_s = (below_s - optimizer_s) / facts.microbatches
    if stage_s <= 0:
        return Proof(True, "one optimizer step takes as long (volume bound)")
    found = _first(methods, facts, stage_s)
    if found.holds:
        return Proof(True, f"no stages are fast enough for a better step (volume bound: {found.detail})")
    return Proof(None, "its stages alone, without order and links, do not rule a better step out")


def _volume_long(facts: Facts, below_s: float) -> Proof:
    return _volume(facts, below_s, LONG)


SPLIT: tuple[Method, ...] = (_volume, split.prove, _volume_long)
"""For a step whose weight gradients may be put off: the paths of the others do not hold then."""
ITERATION: tuple[Method, ...] = (_volume, trips.prove, paths.prove, _volume_long)
