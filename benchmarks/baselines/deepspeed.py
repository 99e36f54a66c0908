"""DeepSpeed's ``partition_balanced``: layers' costs in parts of about equal weight, for equal devices.

From its published source (``deepspeed/runtime/utils.py``, 2020–2025). It does not know devices' speeds. On
equal devices it misses the optimum where the first layer alone weighs more than the limit that is probed: the
sum before the first part is then read from the end of the list, and the probe goes on as if all were placed.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from baselines.common import Assignment, NotApplicableError, assignment, costs
from skyctl.records.problem import Problem

EPS = 1e-3


def balanced_parts(problem: Problem) -> Assignment:
    """One part a device, in inventory order. Costs are taken in units of their mean."""
    values = costs(problem)
    mean = sum(values) / len(values)
    return assignment(problem, balanced_cuts([value / mean for value in values], len(problem.devices)))


def balanced_cuts(weights: list[float], parts: int) -> list[int]:
    """The starts of the parts, and the end. Raises NotApplicableError where its last probe fails."""
    count = len(weights)
    if count <= parts:
        return [min(p, count) for p in range(parts + 1)]
    upto = list(accumulate(weights))  # inclusive: upto[i] is layers 0 … i
    low, high = upto[-1] / parts, upto[-1]
    while high > low + EPS:
        middle = low + (high - low) / 2
        if _probe(upto, parts, middle)[1]:
            high = middle
        else:
            low = middle + EPS
    cuts, done = _probe(upto, parts, high)
    if not done:
        raise NotApplicableError("partition_balanced: its search ends on a limit that its probe refuses")
    return cuts


def _probe(upto: list[float], parts: int, limit: float) -> tuple[list[int], bool]:
    """Fills each part up to the limit; whether all layers found a place."""
    count = len(upto)
    cuts = [0] + [count] * parts
    chunk = step = count // parts
    target = limit
    for p in range(1, parts):
        while step < count and upto[step] < target:
            step += chunk
        cut = cuts[p] = bisect_left(upto, target, step - chunk, min(step, count))
        if cut == count:
            return cuts, upto[-1] - upto[cuts[p - 1]] < limit
        target = upto[cut - 1] + limit
    return cuts, target >= upto[-1]
