"""Why a device does not hold the model: no memory, no microbatch, or gradients that it does not pay for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import count

from skyctl.planner.data.data_placement import (
    DataPlacement,
    ReplicaGroup,
    asked_groups,
    best_of_groups,
    fitting_groups,
)
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.data.replica_shortage import shortage_words
from skyctl.planner.explanation import unused_devices
from skyctl.planner.sum_costs import MOST_HELPERS
from skyctl.records.plan import Certificate, Plan, Strategy
from skyctl.records.problem import MOST_MICROBATCHES

SAID: Mapping[Strategy, str] = {
    **unused_devices.SAID,
    "even": "it is to help, and the routes of equal shares do without it",
}
"""The strategies that alone say why a device is unused, with what they say."""
MOST_LAYOUTS = 1_000
"""Rings and stars that are looked at for all reasons together, about a second's worth."""

MOST_PACKED = 8
"""Replicas up to which trees are packed for a reason; beyond, rings and stars are looked at."""
PACKED_S = 2.0
"""For packing trees, of all reasons together; those that come later look at rings and stars."""


class _Beside:
    """A plan's replicas, and what they are compared with: the same with one more device beside them."""

    def __init__(self, model: ReplicaCosts, replicas: tuple[int, ...], deadline: float) -> None:
        self._model, self._replicas = model, replicas
        self._deadline = min(deadline, time.perf_counter() + PACKED_S)
        self._few: dict[bool, list[ReplicaGroup]] = {}

    def with_one_more(self, device: int) -> _OneMore:
        """Both over trees as well while there is time to pack them, or both without."""
        more = tuple(sorted((*self._replicas, device)))
        packs = len(more) <= MOST_PACKED and time.perf_counter() < self._deadline
        if packs not in self._few:
            self._few[packs] = self._groups(self._replicas, packs=packs)
        return _OneMore(self._model.microbatches, self._few[packs], self._groups(more, packs=packs))

    def _groups(self, replicas: tuple[int, ...], *, packs: bool) -> list[ReplicaGroup]:
        if packs:
            return asked_groups(self._model, replicas, self._deadline)
        return list(fitting_groups(self._model, replicas))


class _OneMore:
    """A plan's replicas with one more device beside them: what a step takes, and when that pays.

    Args:
        few: the ways of the plan's replicas to sum.
        more: those with one device more.
    """

    def __init__(self, microbatches: int, few: list[ReplicaGroup], more: list[ReplicaGroup]) -> None:
        self._microbatches, self._few, self._more = microbatches, few, more

    def best(self) -> DataPlacement | None:
        """The best candidate with the device; None: it has no memory for any layout."""
        return best_of_groups(self._more, self._microbatches)

    def pays_from(self) -> int | None:
        """The fewest microbatches with which a step is faster with the device, by doubling and bisection.

        None: none up to the most that a step may have.
        """
        low, high = self._microbatches, 2 * self._microbatches
        while not self._pays(high):
            if high >= MOST_MICROBATCHES:
                return None
            low, high = high, min(4 * high, MOST_MICROBATCHES)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._pays(middle) else (middle, high)
        return high

    def _pays(self, microbatches: int) -> bool:
        few = best_of_groups(self._few, microbatches)
        return few is not None and best_of_groups(self._more, microbatches, few.iteration_s) is not None


def explain_unused(
    model: ReplicaCosts, strategy: Strategy, placed: DataPlacement, proof: Certificate, deadline: float
) -> Callable[[int], str]:
    """Why a device holds nothing and does not help.

    ``deadline``: when to look no further for what a device would cost, in seconds of ``time.perf_counter``.
    """
    if (reason := SAID.get(strategy)) is not None:
        return lambda _: reason
    claim = unused_devices.known_without(proof)
    looked_at = count(len(placed.replicas) + 2, len(placed.replicas) + 2)
    beside = _Beside(model, placed.replicas, deadline)

    def why(device: int) -> str:
        if (fact := _kept_out(model, placed, device)) is not None:
            return fact
        may_look = next(looked_at) <= MOST_LAYOUTS and time.perf_counter() < deadline
        return _unpaid(model, placed, device, beside, claim) if may_look else claim

    return why


def _kept_out(model: ReplicaCosts, placed: DataPlacement, device: int) -> str | None:
    """A fact that keeps the device out of every plan, or out of one with so few microbatches."""
    if model.ids[device] in (model.problem.helpers or ()):
        return _no_help(model, placed, device)
    if not model.may_hold[device]:
        return "a pin keeps it from the first or the last layer, and so from the whole model"
    if model.fitting_cost(device) is None:
        return f"the whole model does not fit: {shortage_words(model, device)}"
    if len(placed.replicas) >= model.microbatches:
        count = model.microbatches
        return f"the step has only {count} microbatch{'es' if count > 1 else ''}, one for each of the others"
    return None


def _no_help(model: ReplicaCosts, placed: DataPlacement, device: int) -> str:
    """Why a device that is named as a helper is on no route."""
    if len(placed.replicas) == 1:
        return "it is to help, and one device trains alone: there is nothing to sum"
    if not model.may_help(device, 0):
        return "it is to help, and has no memory for its part of the sums"
    if device not in model.helpers_of(placed.replicas):
        return f"it is to help, and {MOST_HELPERS} others that may have fatter lines"
    return "it is to help, and no routes over it that save enough were found"


def _unpaid(model: ReplicaCosts, placed: DataPlacement, device: int, beside: _Beside, claim: str) -> str:
    """The reason: what it would cost to add the device, and from how many microbatches on it would pay."""
    one_more = beside.with_one_more(device)
    added = one_more.best()
    if added is None:
        return f"{claim}; with it, no way to sum gradients fits in memory"
    change = added.iteration_s / placed.iteration_s - 1 if placed.iteration_s > 0 else 0.0
    slower = _slower(change) if change > unused_devices.NOTABLE else "no faster"
    share = added.shares[added.replicas.index(device)]
    reason = (
        f"{claim}; with it a step would be {slower} ({added.iteration_s:.3g} s): it would take {share} of "
        f"{model.microbatches} microbatches, and summing gradients would take {added.sync_s:.3g} s after the "
        "last backward"
    )
    pays_from = one_more.pays_from()
    if pays_from is None:
        return f"{reason}; it would not pay with more microbatches either"
    return f"{reason}; it would pay from {pays_from} microbatches a step on"


def _slower(change: float) -> str:
    """A step that takes ``change`` more, relative, in words: ``12% slower``, ``3.4 times as long``."""
    if change >= 1:
        return f"{1 + change:.3g} times as long"
    return f"{unused_devices.percent_text(change)} slower"


def least_paying(plan: Plan) -> tuple[int, str] | None:
    """The fewest microbatches with which one more device would pay, and that device; None: none would.

    The replicas are the plan's; another set of them may pay with fewer.
    """
    model = ReplicaCosts(plan.problem)
    index = {name: d for d, name in enumerate(model.ids)}
    replicas = tuple(sorted(index[stage.device] for stage in plan.placed_stages))
    paying = []
    beside = _Beside(model, replicas, time.perf_counter() + PACKED_S)
    for number, unused in enumerate(plan.unused, start=1):
        device = index[unused.device]
        if model.fitting_cost(device) is not None and number * (len(replicas) + 2) <= MOST_LAYOUTS:
            pays_from = beside.with_one_more(device).pays_from()
            if pays_from is not None:
                paying.append((pays_from, unused.device))
    return min(paying, default=None)
