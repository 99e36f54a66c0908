"""What no plan of some holders can be faster than, whatever routes they sum over: cuts, and a level.

Over trees a device may send over all of its lines at once; in a ring and in a star every byte that it sends
goes over one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from skyctl.planner.data.holder_costs import DataModel, message_factor
from skyctl.planner.data.line_rates import line_byte_s, lines_rate
from skyctl.planner.data.shares import level_shares

ONE_LINE = ("ring", "star", "server")
"""Of ``Problem.sync``: where every byte that a device sends, or receives, goes over one of its lines."""


def least_byte_s(model: DataModel, device: int, others: Sequence[int]) -> float:
    """Seconds that a byte takes at least, if the device is one of several holders among ``others``.

    Every holder sends each byte once at least, and receives it once.

    Args:
        others: all that may hold or help beside it.
    """
    out, back = [(device, x) for x in others], [(x, device) for x in others]
    if model.problem.sync in ONE_LINE:
        return max(min(line_byte_s(model, *pair) for pair in pairs) for pairs in (out, back))
    return max(1 / lines_rate(model, out), 1 / lines_rate(model, back))


def cut_byte_s(model: DataModel, holders: Sequence[int]) -> float:
    """Seconds that a byte takes at least on its way among two holders or more, whatever the routes.

    Each holder's lines, to other holders and to those that may help; and all lines together, helpers' as
    well: each byte is sent 2(n − 1) times.
    """
    there = (*holders, *model.helpers_of(holders))
    rates: list[list[float]] = [[], []]
    for d in there:
        others = [x for x in there if x != d]
        rates[0].append(lines_rate(model, [(d, x) for x in others]))
        rates[1].append(lines_rate(model, [(x, d) for x in others]))
    least = [1 / min(each[: len(holders)]) for each in rates]
    sent = 2 * (len(holders) - 1)
    return max(*least, *(sent / math.fsum(each) for each in rates))


def set_bound_s(model: DataModel, holders: Sequence[int], byte_s: float) -> float:
    """The least step of these holders, each with a microbatch or more, if a byte takes ``byte_s`` or more.

    Infinite where there are fewer microbatches.
    """
    times, extras, optimizers = [], [], []
    delayed, factor = model.problem.rhythm.delay, message_factor(model.problem, byte_s)
    for d in holders:
        cost = model.fitting_cost(d)
        assert cost is not None
        times.append(cost.microbatch_s)
        passed_s = 2 * factor * model.problem.devices[d].message_byte_s * model.total_bytes
        extras.append(passed_s + cost.optimizer_s if delayed else max(cost.exposure.at(byte_s), passed_s))
        optimizers.append(cost.optimizer_s)
    shares = level_shares(times, extras, model.microbatches)
    if shares is None:
        return math.inf
    level_s = max(m * t + e for m, t, e in zip(shares, times, extras, strict=True))
    latency_s = _least_latency_s(model, holders)
    if delayed:
        return max(level_s, model.total_bytes * byte_s + latency_s)
    return level_s + latency_s + max(optimizers)


def _least_latency_s(model: DataModel, holders: Sequence[int]) -> float:
    """Of any route: from every holder there is a way to the root, and one back, over helpers as well."""
    there, count = (*holders, *model.helpers_of(holders)), len(holders)
    away_s = np.array([[model.latency_s.get((a, b), 0.0) if a != b else 0.0 for b in there] for a in there])
    for over in range(len(there)):  # Floyd 1962
        away_s = np.minimum(away_s, away_s[:, over, None] + away_s[None, over, :])
    return float((away_s[:count].max(axis=0) + away_s[:, :count].max(axis=1)).min())
