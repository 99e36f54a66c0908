"""The most helpful changes: another choice, then small ones to the machines, each with a plan that shows it.

Every line is a claim of existence: with the change there is a plan that takes that much less (or, without a
device, no more). The plans come from the heuristic on the changed problem and a short descent from the
current plan; so more may be saved than is said, never less. The change gets no credit for a gain that the
same search finds without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from skyctl.errors import SkyctlError
from skyctl.planner.cost_model import CostModel, Placement, StageAssignment
from skyctl.planner.explanation.plan_reasons import stage_views
from skyctl.planner.explanation.what_if import (
    ChangeKind,
    ProblemChange,
    faster_link,
    faster_shared,
    free_changes,
    with_more_memory,
    without_device,
)
from skyctl.planner.local_search import first_improvement, neighbours
from skyctl.planner.optimal_search import good_placement
from skyctl.planner.pipeline_depth import choose_execution
from skyctl.planner.plan_record import read_placement
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem

LINES = 3
WORTH = 0.01
"""Savings below this share of the objective are not worth a line."""
NO_LOSS = 0.001
"""Up to this loss, relative, nothing is said to be lost without a device."""
DISPENSABLE_LOSS = 0.03
"""A device is called dispensable up to this loss, relative."""
FULL = 0.75
"""Devices whose memory is used from this share on are given more."""
ENOUGH_SHARE = 0.8
"""A smaller size of memory is advised where it saves this share of what unlimited memory would."""
LARGEST = 100_000
"""Stages × layers from which on nothing is tried."""
SMALL = 1_500
"""Stages × layers up to which the heuristic is asked too, not the descent alone."""
ROUNDING = 1e-9
EACH = 4
"""Devices, links and shared resources tried of each sort."""


@dataclass(frozen=True)
class Advice:
    """One change, and the share of the objective it saves at least (negative: what it costs at most).

    ``kind``: ``device`` for one that is hardly missed; ``name``: which device, link, schedule or field;
    ``plan_value_s``: the objective of the plan found with the change.
    """

    kind: ChangeKind | Literal["strategy"]
    name: str
    saves: float
    plan_value_s: float
    text: str


MOST_S = 1.5
"""Seconds in which most of what can be found is."""


def advise(plan: Plan, budget_s: float = MOST_S) -> tuple[Advice, ...]:
    """At most three changes that save 1% or more, the free ones first; then devices that are hardly missed.

    For a plan that was not searched for (``even``, ``alone``, ``assigned``): only what a search would save.

    Args:
        budget_s: seconds after which to stop trying, ``MOST_S`` at most; large problems get a third of that,
            very large ones nothing.
    """
    if plan.certificate.whole_blocks is not None:
        return ()  # cuts inside blocks, which the search here makes, are not what was asked for
    size = len(plan.placed_stages) * len(plan.problem.layers)
    if size > LARGEST or plan.certificate.value_s <= 0 or budget_s <= 0:
        return ()
    budget_s = min(budget_s, MOST_S)
    deadline = time.perf_counter() + (budget_s if size <= SMALL else budget_s / 3)
    if plan.strategy not in ("heuristic", "optimal"):
        return _searched(plan, size, deadline)
    search = _AdviceSearch(plan, deadline)
    tried: list[tuple[ProblemChange, Placement, float]] = []
    for change in search.changes():
        if search.late():
            break
        better = search.best(change.problem)
        if better is not None:
            tried.append((change, *better))
    out = []
    for change, placement, value in tried:
        if change.kind == "memory" and 1 - value / search.value_s >= WORTH:
            change, value = search.enough_memory(change, placement, value)  # noqa: PLW2901
        text = _text(change, value / search.value_s, plan.problem.objective)
        if text:
            out.append(Advice(change.kind, change.name, 1 - value / search.value_s, value, text))
    return _ranked(out)


def _ranked(given: Sequence[Advice]) -> tuple[Advice, ...]:
    """The advice to show: three changes, those that cost nothing first, then three dispensable devices."""
    ranked = sorted(given, key=lambda advice: -advice.saves)
    schedules = [advice for advice in ranked if advice.kind == "schedule"][:1]
    pins = [advice for advice in ranked if advice.kind == "pin"]
    devices = [advice for advice in ranked if advice.kind == "device"]
    dtypes = [advice for advice in ranked if advice.kind == "link dtype"]
    if dtypes:  # the one that rounds least and saves about as much
        dtypes = [min(dtypes, key=lambda advice: (advice.saves < dtypes[0].saves - WORTH, advice.name))]
    sorts = ("schedule", "pin", "device", "link dtype")
    others = [*dtypes, *(advice for advice in ranked if advice.kind not in sorts)]
    gratis = sorted([*schedules, *pins], key=lambda advice: -advice.saves)
    others.sort(key=lambda advice: -advice.saves)
    return tuple([*gratis, *others][:LINES] + devices[:LINES])


def _searched(plan: Plan, size: int, deadline: float) -> tuple[Advice, ...]:
    """Advice to search, with what the heuristic would save over a plan that was not searched for."""
    model = CostModel(plan.problem)
    try:
        placement = good_placement(model, simulations=150 if size <= SMALL else 50, deadline=deadline)
        value = choose_execution(model, placement)[0]
    except SkyctlError:
        return ()
    saves = 1 - value / plan.certificate.value_s
    if saves < WORTH:
        return ()
    flags = "--strategy optimal" + (" in place of --assign" if plan.strategy == "assigned" else "")
    return (Advice("strategy", "optimal", saves, value, f"{flags} would save {_at_least(saves)}"),)


def _at_least(share: float) -> str:
    return f"{math.floor(share * 100 + ROUNDING)}%"


def _text(change: ProblemChange, ratio: float, objective: str) -> str:
    if change.kind != "device":
        return f"{change.what} would save {_at_least(1 - ratio)}" if 1 - ratio >= WORTH else ""
    if ratio < 1 + NO_LOSS:
        return f"{change.name} (nothing is lost without it)"
    if ratio >= 1 + DISPENSABLE_LOSS:
        return ""
    what = "a step takes" if objective == "iteration" else "the slowest stage takes"
    at_most = math.ceil((ratio - 1) * 1000 - ROUNDING) / 10
    return f"{change.name} (without it {what} at most {at_most:.1f}% longer)"


class _AdviceSearch:
    """The same search for the problem as it is and for each changed one."""

    def __init__(self, plan: Plan, deadline: float) -> None:
        self.plan = plan
        self.deadline = deadline
        self.share_s = max(0.0, deadline - time.perf_counter()) / 6
        self.model = CostModel(plan.problem)
        self.placement, _ = read_placement(self.model, plan)
        self.value_s = plan.certificate.value_s
        self.small = len(self.placement) * self.model.layers <= SMALL
        if plan.certificate.status != "optimal":
            self._better(*self._search(self.model, self.placement))

    def late(self) -> bool:
        """Whether the time for advice is over."""
        return time.perf_counter() > self.deadline

    def _better(self, placement: Placement, value: float) -> None:
        if value < self.value_s:
            self.placement, self.value_s = placement, value

    def best(self, changed: Problem) -> tuple[Placement, float] | None:
        """The best plan found for a changed problem (devices by their index there), and its objective."""
        model = CostModel(changed)
        start = self._carried(model)
        options = [] if start is None else [self._search(model, start)]
        if self.small and not self.late():
            began = time.perf_counter()
            try:
                placement = good_placement(model, deadline=self.deadline)
                options.append((placement, choose_execution(model, placement)[0]))
            except SkyctlError:
                pass
            self.small = time.perf_counter() - began < self.share_s
        if not options:
            return None
        placement, value = min(options, key=lambda option: option[1])
        self._without_the_change(model, placement)
        return placement, value

    def _without_the_change(self, changed: CostModel, placement: Placement) -> None:
        """If the plan is also better without the change, changes are measured against it from now on."""
        if self.plan.certificate.status != "optimal":
            here = tuple(p._replace(device=self.model.index(changed.ids[p.device])) for p in placement)
            if self.model.is_allowed(here):
                self._better(here, choose_execution(self.model, here)[0])

    def _carried(self, model: CostModel) -> Placement | None:
        """The current plan on a changed problem; its neighbours take over the layers of a removed device."""
        remaining = set(model.ids)
        ids = [self.model.ids[stage.device] for stage in self.placement]
        kept = [
            (name, p.start, p.stop) for name, p in zip(ids, self.placement, strict=True) if name in remaining
        ]
        if not kept:
            return None
        if len(kept) == len(self.placement):
            same = tuple(StageAssignment(model.index(name), p, q) for name, p, q in kept)
            return same if model.is_allowed(same) else None
        gone = next(s for s, name in enumerate(ids) if name not in remaining)
        start, stop = self.placement[gone].start, self.placement[gone].stop
        cuts = {start, (start + stop) // 2, stop}
        if gone in (0, len(ids) - 1):
            cuts = {stop if gone else start}
        options = []
        for cut in sorted(cuts):
            placement = tuple(
                StageAssignment(model.index(name), cut if p == stop and gone else p, cut if q == start else q)
                for name, p, q in kept
            )
            placement = (placement[0]._replace(start=0), *placement[1:])
            if model.is_allowed(placement):
                options.append((choose_execution(model, placement)[0], placement))
        return min(options)[1] if options else None

    def _search(self, model: CostModel, placement: Placement) -> tuple[Placement, float]:
        """A short descent from a plan."""
        value = choose_execution(model, placement)[0]
        stop = min(self.deadline, time.perf_counter() + self.share_s)
        return first_improvement(model, placement, value, neighbours, lambda: time.perf_counter() > stop)

    def changes(self) -> Iterator[ProblemChange]:
        """The changes to try: first those that cost nothing, then the most promising of each sort in turn."""
        full = any(v.memory_share is not None and v.memory_share >= FULL for v in stage_views(self.plan))
        yield from free_changes(self.plan, full=full)
        sorts = [list(make()) for make in (self._memory, self._links, self._shared, self._devices)]
        for row in range(EACH):
            for sort in sorts:
                if row < len(sort):
                    yield sort[row]

    def _memory(self) -> Iterator[ProblemChange]:
        """A full device without a memory limit, the least loaded first; see ``enough_memory``."""
        full = [v for v in stage_views(self.plan) if v.memory_share is not None and v.memory_share >= FULL]
        idle = {u.device for u in self.plan.unused}
        names = [v.device for v in sorted(full, key=lambda v: (v.load, v.device))]
        names += [d.id for d in self.plan.problem.devices if d.id in idle and d.memory_bytes is not None]
        for name in names[:EACH]:
            yield ProblemChange(
                "memory", name, f"more memory on {name}", with_more_memory(self.plan.problem, name, None)
            )

    def enough_memory(
        self, change: ProblemChange, placement: Placement, value: float
    ) -> tuple[ProblemChange, float]:
        """The change with a size of memory that is sold and saves most of it, and the objective then."""
        unlimited = CostModel(change.problem)
        runs = zip(placement, *choose_execution(unlimited, placement)[1], strict=True)
        need = next(
            unlimited.need_bytes(p, q, in_flight, deferred, recompute=recompute)
            for (d, p, q), in_flight, deferred, recompute in runs
            if unlimited.ids[d] == change.name
        )
        most = _size_sold(need - self.model.available_bytes[self.model.index(change.name)])
        for more in (most / 8, most / 4, most / 2):
            small = more < 1 or more != _size_sold(more)
            better = (
                None
                if small or self.late()
                else self.best(with_more_memory(self.plan.problem, change.name, more))
            )
            if better is not None and self.value_s - better[1] >= ENOUGH_SHARE * (self.value_s - value):
                most, value = more, better[1]
                break
        return replace(change, what=f"{human_bytes(most)} more on {change.name}"), value

    def _links(self) -> Iterator[ProblemChange]:
        """Twice the bandwidth, both ways, between stages whose messages take longest."""
        if not self.model.by_iteration:
            return
        slow = []
        for a, b in pairwise(self.placement):
            there, back = (
                self.model.message_times(x, y, a.stop).link_s
                for x, y in ((a.device, b.device), (b.device, a.device))
            )
            slow.append((max(there, back), self.model.ids[a.device], self.model.ids[b.device]))
        for seconds, a_name, b_name in sorted(slow, reverse=True)[:EACH]:
            if seconds > 0:
                yield faster_link(self.plan.problem, a_name, b_name)

    def _shared(self) -> Iterator[ProblemChange]:
        return faster_shared(self.plan.problem) if self.model.by_iteration else iter(())

    def _devices(self) -> Iterator[ProblemChange]:
        """Leaving out one of the devices in use, those with the fewest layers first."""
        if len(self.placement) < 2:
            return
        layers = {v.device: (v.stop - v.start, v.device) for v in stage_views(self.plan)}
        for name in sorted(layers, key=lambda name: layers[name])[:EACH]:
            changed = without_device(self.plan.problem, name)
            if changed is not None:
                yield ProblemChange("device", name, f"without {name}", changed)


def _size_sold(count_bytes: float) -> float:
    """Rounded up to a power of two; between 8 and 128 GiB to whole 8 GiB."""
    step = 8 * 2.0**30
    if step < count_bytes <= 16 * step:
        return -(-count_bytes // step) * step
    size = 1.0
    while size < count_bytes:
        size *= 2
    return size
