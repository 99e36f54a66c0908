"""Goes through the hybrids of small problems one by one, for a bound that no prices prove.

First all pipelines that alone, with whatever partners, would keep a limit. If no disjoint ones of them
take all microbatches together, no plan keeps it. Else it plays their sums as well, plan by plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product

from skyctl.planner.verification.problem_data import Proof
from skyctl.planner.verification.reading import HeldRange, ReadPlan, Row, SummedRange, held_together
from skyctl.planner.verification.step import CheckedStep
from skyctl.schedule.actions import least_in_flight

MOST_DEVICES = 5
MOST_PIPELINES = 50_000
"""Pipelines that are simulated at most, by devices in order, cuts and microbatches."""
MOST_PLANS = 20_000
"""Plans whose sums are played at most."""

Rows = dict[frozenset[int], dict[int, list[Row]]]
"""Pipelines by their devices, then by microbatches."""


def prove_by_enumeration(step: CheckedStep, below_s: float) -> Proof:
    """Whether no plan of two pipelines or more has a step below ``below_s`` seconds."""
    devices, layers = len(step.ids), step.facts.layers
    most = min(devices - 1, layers)
    rows = sum(math.perm(devices, k) * math.comb(layers - 1, k - 1) for k in range(1, most + 1))
    if devices > MOST_DEVICES or rows * (step.problem.microbatches - 1) > MOST_PIPELINES:
        return Proof(None, "there are too many pipelines to go through")
    kept: Rows = {}
    for size in range(1, most + 1):
        for order in permutations(range(devices), size):
            for cuts in combinations(range(1, layers), size - 1):
                for count in range(1, step.problem.microbatches):
                    row = _row(step, order, (0, *cuts, layers), count)
                    if _may_keep(step, row, below_s):
                        kept.setdefault(frozenset(order), {}).setdefault(count, []).append(row)
    played = 0
    for parts in _disjoint(list(kept), step.problem.microbatches):
        for rows_of in _shared_out(kept, parts, step.problem.microbatches):
            for plan in product(*rows_of):
                played += 1
                if played > MOST_PLANS:
                    return Proof(None, "there are too many plans to go through")
                if _keeps(step, plan, below_s):
                    named = " | ".join(" ".join(step.ids[held.device] for held in row) for row in plan)
                    return Proof(False, f"{named} is faster")
    if not played:
        return Proof(True, "no pipelines that keep it by themselves take all microbatches together")
    return Proof(True, f"none of the {played} plans whose pipelines keep it by themselves does with its sums")


def _row(step: CheckedStep, order: Sequence[int], cuts: Sequence[int], count: int) -> Row:
    schedule, stages = step.problem.schedule, len(order)
    return tuple(
        HeldRange(device, start, stop, least_in_flight(schedule, number, stages, count), count)
        for number, (device, (start, stop)) in enumerate(zip(order, pairwise(cuts), strict=True))
    )


def _may_keep(step: CheckedStep, row: Row, below_s: float) -> bool:
    """Whether it is allowed, and ends early enough but for its sums."""
    facts = step.facts
    if not (facts.may_be_first(row[0].device) and facts.may_be_last(row[-1].device)):
        return False
    slowest_s = max(step.optimizer_s(held) for held in row)
    # with a delay nobody waits for another's optimizer
    optimizers = [step.optimizer_s(held) if step.sums.delayed else slowest_s for held in row]
    for held, optimizer_s in zip(row, optimizers, strict=True):
        if step.computes_s(held) + optimizer_s >= below_s:
            return False
        if step.splits_tie(held.start, held.stop):
            return False
        if not step.fits(step.ids[held.device], step.stage_bytes(held)):
            return False
    return max(end + more for end, more in zip(step.ends(row), optimizers, strict=True)) < below_s


def _disjoint(sets: Sequence[frozenset[int]], most: int) -> Iterator[tuple[frozenset[int], ...]]:
    """Two of the sets or more that have no device in common."""

    def more(
        chosen: tuple[frozenset[int], ...], at: int, used: frozenset[int]
    ) -> Iterator[tuple[frozenset[int], ...]]:
        if len(chosen) > 1:
            yield chosen
        if len(chosen) < most:
            for number in range(at, len(sets)):
                if not used & sets[number]:
                    yield from more((*chosen, sets[number]), number + 1, used | sets[number])

    yield from more((), 0, frozenset())


def _shared_out(kept: Rows, parts: Sequence[frozenset[int]], total: int) -> Iterator[list[list[Row]]]:
    """By way to share the microbatches out, each part's pipelines."""
    for counts in product(*(kept[part] for part in parts)):
        if sum(counts) == total:
            yield [kept[part][count] for part, count in zip(parts, counts, strict=True)]


def _keeps(step: CheckedStep, rows: Sequence[Row], below_s: float) -> bool:
    """Whether a plan of these pipelines fits, and its step with all sums is below the limit."""
    groups = tuple(
        SummedRange(start, stop, step.sums.chosen_trees(start, stop, devices), tuple(devices))
        for start, stop, devices in held_together(step.problem, rows)
    )
    plan = ReadPlan(tuple(rows), groups)
    for held in plan.held:
        need = step.need_bytes(held, groups, plan.chunk_bytes)
        if not step.fits(step.ids[held.device], need):
            return False
    return step.play(plan).iteration_s < below_s
