"""Bounds that no plan of some replicas is below, whatever routes they sum over: cuts, and a level.

Over trees a device may send over all of its lines at once; in a ring and in a star every byte that it sends
goes over one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.sum_costs import message_factor
from skyctl.schedule.batch_shares import best_shares

ONE_LINE = ("ring", "star", "server")
"""Of ``Problem.sync``: where every byte that a device sends, or receives, goes over one of its lines."""


def least_byte_s(model: ReplicaCosts, device: int, others: Sequence[int]) -> float:
    """Seconds that a byte takes at least, if the device is one of several replicas among ``others``.

    Every replica sends each byte once at least, and receives it once.

    Args:
        others: all that may hold or help beside it.
    """
    if model.problem.sync in ONE_LINE:
        there = np.asarray(others, dtype=np.int64)
        return float(max(model.line_table[device, there].min(), model.line_table[there, device].min()))
    return max(1 / model.lines_rate(device, others), 1 / model.lines_rate(device, others, arriving=True))


def cut_byte_s(model: ReplicaCosts, replicas: Sequence[int]) -> float:
    """Seconds that a byte takes at least on its way among two replicas or more, whatever the routes.

    Each replica's lines, to other replicas and to those that may help; and all lines together, helpers' as
    well: each byte is sent 2(n − 1) times.
    """
    there = (*replicas, *model.helpers_of(replicas))
    rates: list[list[float]] = [[], []]
    for d in there:
        others = [x for x in there if x != d]
        rates[0].append(model.lines_rate(d, others))
        rates[1].append(model.lines_rate(d, others, arriving=True))
    least = [1 / min(each[: len(replicas)]) for each in rates]
    sent = 2 * (len(replicas) - 1)
    return max(*least, *(sent / math.fsum(each) for each in rates))


def set_bound_s(model: ReplicaCosts, replicas: Sequence[int], byte_s: float) -> float:
    """The least step of these replicas, each with a microbatch or more, if a byte takes ``byte_s`` or more.

    Infinite where there are fewer microbatches.
    """
    times, extras, optimizers = [], [], []
    delayed, factor = model.problem.rhythm.delay, message_factor(model.problem, byte_s)
    for d in replicas:
        cost = model.fitting_cost(d)
        assert cost is not None
        times.append(cost.microbatch_s)
        passed_s = 2 * factor * model.problem.devices[d].message_byte_s * model.total_bytes
        extras.append(
            passed_s + cost.optimizer_s if delayed else max(cost.exposure.unhidden_s(byte_s), passed_s)
        )
        optimizers.append(cost.optimizer_s)
    if model.microbatches < len(times):
        return math.inf
    shares = best_shares(model.microbatches, extras, times)
    level_s = max(m * t + e for m, t, e in zip(shares, times, extras, strict=True))
    latency_s = _least_latency_s(model, replicas)
    if delayed:
        return max(level_s, model.total_bytes * byte_s + latency_s)
    return level_s + latency_s + max(optimizers)


def _least_latency_s(model: ReplicaCosts, replicas: Sequence[int]) -> float:
    """Of any route: from every replica there is a way to the root, and one back, over helpers as well."""
    there, count = (*replicas, *model.helpers_of(replicas)), len(replicas)
    away_s = model.latency_table[np.ix_(there, there)]
    for over in range(len(there)):  # Floyd 1962
        away_s = np.minimum(away_s, away_s[:, over, None] + away_s[None, over, :])
    return float((away_s[:count].max(axis=0) + away_s[:, :count].max(axis=1)).min())
