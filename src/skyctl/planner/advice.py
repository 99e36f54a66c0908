"""What would help most: another choice, then small changes to the machines, each with a plan that shows it.

Every line is a claim of existence: with the change there is a plan that takes that much less (or, without a
device, no more). The plans come from the heuristic on the changed problem and a short descent from the
current plan; so more may be saved than is said, never less. What the same search finds without any change is
not put down to the change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from skyctl.errors import SkyctlError
from skyctl.planner.depths import value_s
from skyctl.planner.evaluate import bound_s
from skyctl.planner.explain import stages
from skyctl.planner.grid import grid
from skyctl.planner.memory import human
from skyctl.planner.model import Model, Piece
from skyctl.planner.neighbours import moves
from skyctl.planner.offers import Change, free
from skyctl.planner.recompute import good_plan
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem

LINES = 3
WORTH = 0.01
"""Savings below this share of the objective are not worth a line."""
NOTHING = 0.001
LITTLE = 0.03
"""A device is called dispensable up to this loss."""
FULL = 0.75
"""Devices whose memory is used from this share on are given more."""
MOST = 0.8
"""A smaller size of memory will do where it saves this share of what any amount would."""
LARGEST = 100_000
"""Stages × layers from which on nothing is tried."""
SMALL = 1_500
"""Stages × layers up to which the heuristic is asked too, not the descent alone."""
ROUNDING = 1e-9
WHOLE_BLOCKS = "whole blocks only"
"""How the certificate's method begins where only plans of whole blocks were looked at."""
EACH = 4
"""Devices, links and shared resources tried of each sort."""

Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Advice:
    """One change, and the share of the objective it saves at least (negative: what it costs at most).

    ``kind``: strategy, schedule, pin, recompute, link dtype (these cost nothing), memory, link, shared, or
    device (one that is hardly missed); ``name``: which; ``plan_value_s``: the found plan's objective.
    """

    kind: str
    name: str
    saves: float
    plan_value_s: float
    text: str


def advise(plan: Plan, budget_s: float = 1.5) -> tuple[Advice, ...]:
    """At most three changes that save a hundredth or more, the free ones first; then devices hardly missed.

    A plan of no search (``even``, ``assigned``) is only told what a search would save.

    Args:
        budget_s: when to stop trying; large problems get a third of it, very large ones nothing.
    """
    if plan.certificate.method.startswith(WHOLE_BLOCKS):
        return ()  # cuts inside blocks, which the search here makes, are not what was asked for
    size = len(plan.stages) * len(plan.problem.layers)
    if size > LARGEST or plan.certificate.value_s <= 0 or budget_s <= 0:
        return ()
    if plan.strategy not in ("heuristic", "optimal"):
        return _searched(plan, size)
    search = _Search(plan, time.perf_counter() + (budget_s if size <= SMALL else budget_s / 3))
    tried: list[tuple[Change, Pieces, float]] = []
    for change in search.changes():
        if search.late():
            break
        found = search.best(change.problem)
        if found is not None:
            tried.append((change, *found))
    out = []
    for change, pieces, value in tried:
        if change.kind == "memory" and 1 - value / search.value_s >= WORTH:
            change, value = search.enough_memory(change, pieces, value)  # noqa: PLW2901
        text = _text(change, value / search.value_s, plan.problem.objective)
        if text:
            out.append(Advice(change.kind, change.name, 1 - value / search.value_s, value, text))
    return _ranked(out)


def _ranked(given: Sequence[Advice]) -> tuple[Advice, ...]:
    """The best schedule, the pins, the fewest bits lost, the changes to machines: three in all; then three
    devices."""
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


def _searched(plan: Plan, size: int) -> tuple[Advice, ...]:
    """What the heuristic finds instead of a plan that was not searched for."""
    model = Model(plan.problem)
    try:
        value = value_s(model, good_plan(model, plays=150 if size <= SMALL else 50))[0]
    except SkyctlError:
        return ()
    saves = 1 - value / plan.certificate.value_s
    if saves < WORTH:
        return ()
    flags = "--strategy optimal" + (" in place of --assign" if plan.strategy == "assigned" else "")
    return (Advice("strategy", "optimal", saves, value, f"{flags} would save {_at_least(saves)}"),)


def _at_least(share: float) -> str:
    return f"{math.floor(share * 100 + ROUNDING)}%"


def _text(change: Change, ratio: float, objective: str) -> str:
    if change.kind != "device":
        return f"{change.what} would save {_at_least(1 - ratio)}" if 1 - ratio >= WORTH else ""
    if ratio < 1 + NOTHING:
        return f"{change.name} (nothing is lost without it)"
    if ratio >= 1 + LITTLE:
        return ""
    what = "a step takes" if objective == "iteration" else "the slowest stage takes"
    at_most = math.ceil((ratio - 1) * 1000 - ROUNDING) / 10
    return f"{change.name} (without it {what} at most {at_most:.1f}% longer)"


class _Search:
    """The same search for the problem as it is and for each changed one."""

    def __init__(self, plan: Plan, deadline: float) -> None:
        self.plan = plan
        self.deadline = deadline
        self.share_s = max(0.0, deadline - time.perf_counter()) / 6
        self.model = Model(plan.problem)
        self.pieces, _ = grid(self.model, plan)
        self.value_s = plan.certificate.value_s
        self.small = len(self.pieces) * self.model.layers <= SMALL
        if plan.certificate.status != "optimal":
            self._better(*self._search(self.model, self.pieces))

    def late(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() > self.deadline

    def _better(self, pieces: Pieces, value: float) -> None:
        if value < self.value_s:
            self.pieces, self.value_s = pieces, value

    def best(self, changed: Problem) -> tuple[Pieces, float] | None:
        """The best plan found for a changed problem (devices by their index there), and its objective."""
        model = Model(changed)
        start = self._carried(model)
        options = [] if start is None else [self._search(model, start)]
        if self.small and not self.late():
            began = time.perf_counter()
            try:
                pieces = good_plan(model)
                options.append((pieces, value_s(model, pieces)[0]))
            except SkyctlError:
                pass
            self.small = time.perf_counter() - began < self.share_s
        if not options:
            return None
        pieces, value = min(options, key=lambda option: option[1])
        self._without_the_change(model, pieces)
        return pieces, value

    def _without_the_change(self, changed: Model, pieces: Pieces) -> None:
        """A plan that is good as things are now raises the mark that changes are measured by."""
        if self.plan.certificate.status != "optimal":
            here = tuple(p._replace(device=self.model.index(changed.ids[p.device])) for p in pieces)
            if self.model.allowed(here):
                self._better(here, value_s(self.model, here)[0])

    def _carried(self, model: Model) -> Pieces | None:
        """The current plan on a changed problem; the neighbours take the layers of a device that is gone."""
        known = set(model.ids)
        ids = [self.model.ids[piece.device] for piece in self.pieces]
        kept = [(name, p.start, p.stop) for name, p in zip(ids, self.pieces, strict=True) if name in known]
        if not kept:
            return None
        if len(kept) == len(self.pieces):
            same = tuple(Piece(model.index(name), p, q) for name, p, q in kept)
            return same if model.allowed(same) else None
        gone = next(s for s, name in enumerate(ids) if name not in known)
        start, stop = self.pieces[gone].start, self.pieces[gone].stop
        cuts = {start, (start + stop) // 2, stop}
        if gone in (0, len(ids) - 1):
            cuts = {stop if gone else start}
        options = []
        for cut in sorted(cuts):
            pieces = tuple(
                Piece(model.index(name), cut if p == stop and gone else p, cut if q == start else q)
                for name, p, q in kept
            )
            pieces = (pieces[0]._replace(start=0), *pieces[1:])
            if model.allowed(pieces):
                options.append((value_s(model, pieces)[0], pieces))
        return min(options)[1] if options else None

    def _search(self, model: Model, pieces: Pieces) -> tuple[Pieces, float]:
        """First improvement over ``moves`` until none is left or the time is over."""
        value = value_s(model, pieces)[0]
        stop = min(self.deadline, time.perf_counter() + self.share_s)
        improved = True
        while improved:
            improved = False
            for other in moves(pieces):
                if time.perf_counter() > stop:
                    return pieces, value
                if not model.allowed(other) or (model.by_iteration and bound_s(model, other) >= value):
                    continue
                cost = value_s(model, other)[0]
                if cost < value * (1 - 1e-9):
                    pieces, value, improved = other, cost, True
                    break
        return pieces, value

    def changes(self) -> Iterator[Change]:
        """What to try: first what costs nothing, then the most promising of each sort in turn."""
        full = any(v.memory_share is not None and v.memory_share >= FULL for v in stages(self.plan))
        yield from free(self.plan, full=full)
        sorts = [list(make()) for make in (self._memory, self._links, self._shared, self._devices)]
        for row in range(EACH):
            for sort in sorts:
                if row < len(sort):
                    yield sort[row]

    def _memory(self) -> Iterator[Change]:
        """No limit at all on a full device, the least loaded first; see ``enough_memory``."""
        full = [v for v in stages(self.plan) if v.memory_share is not None and v.memory_share >= FULL]
        idle = {u.device for u in self.plan.unused}
        names = [v.device for v in sorted(full, key=lambda v: (v.load, v.device))]
        names += [d.id for d in self.plan.problem.devices if d.id in idle and d.memory_bytes is not None]
        for name in names[:EACH]:
            yield Change("memory", name, f"more memory on {name}", self._sized(name, None))

    def _sized(self, name: str, more_bytes: float | None) -> Problem:
        def sized(has: float | None) -> float | None:
            return None if has is None or more_bytes is None else has + more_bytes

        devices = tuple(
            d.model_copy(update={"memory_bytes": sized(d.memory_bytes)}) if d.id == name else d
            for d in self.plan.problem.devices
        )
        return self.plan.problem.model_copy(update={"devices": devices})

    def enough_memory(self, change: Change, pieces: Pieces, value: float) -> tuple[Change, float]:
        """A size that is sold with which most of it is saved: at most what the found plan takes."""
        unlimited = Model(change.problem)
        runs = zip(pieces, *value_s(unlimited, pieces)[1], strict=True)
        need = next(
            unlimited.need_bytes(p, q, flying, behind, recompute=again)
            for (d, p, q), flying, behind, again in runs
            if unlimited.ids[d] == change.name
        )
        most = _size_sold(need - self.model.available[self.model.index(change.name)])
        for more in (most / 8, most / 4, most / 2):
            small = more < 1 or more != _size_sold(more)
            found = None if small or self.late() else self.best(self._sized(change.name, more))
            if found is not None and self.value_s - found[1] >= MOST * (self.value_s - value):
                most, value = more, found[1]
                break
        return replace(change, what=f"{human(most)} more on {change.name}"), value

    def _links(self) -> Iterator[Change]:
        """Twice the bandwidth, there and back, between stages whose messages take long."""
        if not self.model.by_iteration:
            return
        slow = []
        for a, b in pairwise(self.pieces):
            there, back = (
                self.model.hop(x, y, a.stop).link_s for x, y in ((a.device, b.device), (b.device, a.device))
            )
            slow.append((max(there, back), self.model.ids[a.device], self.model.ids[b.device]))
        for seconds, a_name, b_name in sorted(slow, reverse=True)[:EACH]:
            if seconds > 0:
                ends = {(a_name, b_name), (b_name, a_name)}
                links = tuple(
                    link.model_copy(update={"bandwidth_bytes_per_s": 2 * link.bandwidth_bytes_per_s})
                    if (link.source, link.target) in ends
                    else link
                    for link in self.plan.problem.links
                )
                changed = self.plan.problem.model_copy(update={"links": links})
                name = f"{a_name} ↔ {b_name}"
                yield Change("link", name, f"twice the bandwidth of {name}", changed)

    def _shared(self) -> Iterator[Change]:
        if not self.model.by_iteration:
            return
        resources = self.plan.problem.shared
        for number, resource in enumerate(resources):
            faster = resource.model_copy(update={"bandwidth_bytes_per_s": 2 * resource.bandwidth_bytes_per_s})
            changed = self.plan.problem.model_copy(
                update={"shared": (*resources[:number], faster, *resources[number + 1 :])}
            )
            yield Change("shared", resource.name, f"twice the bandwidth of {resource.name}", changed)

    def _devices(self) -> Iterator[Change]:
        """Without one of the devices in use, first those that do least of the work."""
        if len(self.pieces) < 2:
            return
        layers = {v.device: (v.stop - v.start, v.device) for v in stages(self.plan)}
        for name in sorted(layers, key=lambda name: layers[name])[:EACH]:
            changed = _without(self.plan.problem, name)
            if changed is not None:
                yield Change("device", name, f"without {name}", changed)


def _without(problem: Problem, name: str) -> Problem | None:
    """The problem without a device; None where it alone may be first or last."""
    pins = {}
    for field in ("first_stage", "last_stage"):
        names = getattr(problem, field)
        pins[field] = None if names is None else tuple(n for n in names if n != name)
        if pins[field] == ():
            return None
    return problem.model_copy(
        update={
            **pins,
            "devices": tuple(d for d in problem.devices if d.id != name),
            "times": {d: times for d, times in problem.times.items() if d != name},
            "links": tuple(k for k in problem.links if name not in (k.source, k.target)),
            "shared": tuple(
                r.model_copy(update={"links": tuple(pair for pair in r.links if name not in pair)})
                for r in problem.shared
            ),
        }
    )


def _size_sold(count_bytes: float) -> float:
    """Rounded up to a power of two; between 8 and 128 GiB to whole 8 GiB."""
    step = 8 * 2.0**30
    if step < count_bytes <= 16 * step:
        return -(-count_bytes // step) * step
    size = 1.0
    while size < count_bytes:
        size *= 2
    return size
