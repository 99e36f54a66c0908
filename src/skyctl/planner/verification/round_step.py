"""A round, added up anew from records for ``verify``: local steps, the average of weights, an outer step.

Nothing is shared with ``planner/rounds``.
"""

from __future__ import annotations

import math
from itertools import combinations

from skyctl.planner.verification.reading import HeldRange, ReadPlan, Row
from skyctl.planner.verification.step import CheckedStep, StepTimes

MOST_DRAWS = 20_000
"""Sets of clients that are looked at one by one; of more the median is counted."""
BEFORE = 1e-9
"""Relative: a step that begins this little before the deadline has not begun."""


def play_round(step: CheckedStep, read: ReadPlan) -> StepTimes:
    """A round; ``sync_s`` is the average, without the outer step."""
    rhythm = step.problem.rhythm
    sync_s = _average_s(step, read)
    round_s = _slowest_s(step, read) + sync_s
    if (rhythm.outer_lr, rhythm.outer_momentum) != (1, 0):
        passes = 5 if rhythm.outer_momentum > 0 else 3
        round_s += passes * max(_pass_s(step, stage) for stage in read.held)
    compute_s = [
        count * (step.computes_s(stage) + step.optimizer_s(stage))
        for count, row in zip(read.local_steps, read.rows, strict=True)
        for stage in row
    ]
    return StepTimes(round_s, sync_s, tuple(compute_s), tuple(max(0.0, round_s - x) for x in compute_s))


def _pass_s(step: CheckedStep, held: HeldRange) -> float:
    """Of the processor once over all weights that it holds."""
    return step.problem.devices[held.device].reduce_byte_s * step.weight_bytes(held)


def _step_s(step: CheckedStep, row: Row) -> float:
    """One local step: the pipeline's play, each stage's optimizer after it, ties' sums, FedProx's term."""
    done_s = max(end_s + step.optimizer_s(stage) for end_s, stage in zip(step.ends(row), row, strict=True))
    done_s += step.tie_exchange_s(row)
    return done_s + (
        max(2 * _pass_s(step, stage) for stage in row) if step.problem.rhythm.prox_mu > 0 else 0.0
    )


def _slowest_s(step: CheckedStep, read: ReadPlan) -> float:
    """Local work of the slowest that takes part, in the median round."""
    rhythm = step.problem.rhythm
    limit_s = rhythm.round_deadline_s
    work = []
    for row, count in zip(read.rows, read.local_steps, strict=True):
        each_s = _step_s(step, row)
        work.append(count * each_s)
        if limit_s is not None and work[-1] > limit_s:
            started = math.ceil(limit_s / each_s * (1 - BEFORE))
            work[-1] = max(1, started) * each_s
    clients = rhythm.clients_per_round or len(work)
    whole = math.comb(len(work), clients)
    if whole <= MOST_DRAWS:
        slowest = sorted(max(drawn) for drawn in combinations(work, clients))
        return slowest[(len(slowest) - 1) // 2]
    work.sort()
    return next(x for i, x in enumerate(work) if 2 * math.comb(i + 1, clients) >= whole)


def _average_s(step: CheckedStep, read: ReadPlan) -> float:
    """The busiest line, shared resource or processor, the longest ways' latency, and what scaling takes.

    A format that rounds makes two sums, one after another, and passes more often over the weights.
    """
    if not read.groups:
        return 0.0
    rounded = step.problem.sync_format != "float32"
    lines: dict[object, float] = {}
    for group in read.groups:
        size = step.sums.group_bytes(group)
        for what, byte_s in step.sums.used_s(group.trees, group.devices).items():
            lines[what] = lines.get(what, 0.0) + size * byte_s
    latency_s = max(step.sums.latency_s(group.trees) for group in read.groups)
    busy_s = max(*lines.values(), *step.processors_s(read.held, read.groups), 0.0)
    passes = (5 if rounded else 2) + step.keeps_start
    return (
        busy_s + (2 if rounded else 1) * latency_s + passes * max(_pass_s(step, stage) for stage in read.held)
    )
