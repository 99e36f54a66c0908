"""Whole shares of a batch: in proportion to speeds, or so that the last to finish finishes first.

A unit is whatever is not cut: a sample, or a microbatch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction


def proportional_shares(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Shares of ``total`` units in proportion to speeds, at least 1 each, by the largest remainder.

    An index that would get less than 1 gets 1, and the others share what is left. Of equal remainders the
    lowest index goes first. Computed in fractions, so every machine gets the same shares.

    Args:
        total: units to share, one or more for each.
        speeds: positive, in any unit, by index.

    Raises:
        ValueError: there are fewer units than speeds, no speed, or one that is not positive and finite.
    """
    _check_enough(total, len(speeds))
    if not all(0 < speed < math.inf for speed in speeds):
        raise ValueError(f"speeds have to be positive and finite, these are not: {list(speeds)}")
    exact = [Fraction(speed) for speed in speeds]
    sharing = set(range(len(exact)))
    while True:
        left, speed = total - (len(exact) - len(sharing)), sum(exact[i] for i in sharing)
        slow = {i for i in sharing if exact[i] * left < speed}
        if not slow:
            break
        sharing -= slow
    quotas = [exact[i] * left / speed if i in sharing else Fraction(1) for i in range(len(exact))]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(exact)), key=lambda i: (shares[i] - quotas[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def best_shares(
    total: int, fixed_s: Sequence[float], per_unit_s: Sequence[float], least: int = 1
) -> tuple[int, ...]:
    """Shares n, ``least`` or more each, that add up to ``total`` with the least max(fixed + n · per_unit).

    Water-filling: one unit after the other goes to whoever would be finished first with it. Those that every
    solution gives out are given out at once.

    Args:
        total: units to share.
        fixed_s: seconds that each takes whatever its share, by index.
        per_unit_s: seconds of a unit, not negative, by index.
        least: units that each takes at least.

    Raises:
        ValueError: there are fewer units than ``least`` for each, or nobody to share them.
    """
    count = len(per_unit_s)
    _check_enough(total, count, least)
    level_s = level_in_parts_s(total, fixed_s, per_unit_s, least)
    # one less than the level allows: the level is rounded, and a share that is too large stays so
    shares = [
        max(least, math.floor(min(total, (level_s - fixed) / each)) - 1) if each > 0 else least
        for fixed, each in zip(fixed_s, per_unit_s, strict=True)
    ]
    if sum(shares) > total:
        shares = [least] * count
    ends = [
        (fixed + (n + 1) * each, i)
        for i, (n, fixed, each) in enumerate(zip(shares, fixed_s, per_unit_s, strict=True))
    ]
    heapq.heapify(ends)
    for _ in range(total - sum(shares)):
        i = ends[0][1]
        shares[i] += 1
        heapq.heapreplace(ends, (fixed_s[i] + (shares[i] + 1) * per_unit_s[i], i))
    return tuple(shares)


def level_in_parts_s(
    total: int, fixed_s: Sequence[float], per_unit_s: Sequence[float], least: int = 1
) -> float:
    """The least max(fixed + n · per_unit), in seconds, if units could be cut: a bound on that of whole ones.

    Each begins to take more than ``least`` at the level fixed + least · per_unit; arguments as in
    ``best_shares``.
    """
    ranked = sorted((fixed + least * each, each) for fixed, each in zip(fixed_s, per_unit_s, strict=True))
    left = float(total - least * len(ranked))
    if left <= 0:
        return ranked[-1][0]
    level_s, rate = ranked[0][0], 0.0
    for begins_s, each in ranked:
        taken = (begins_s - level_s) * rate
        if taken >= left:
            break
        level_s, left = begins_s, left - taken
        if each <= 0:
            return level_s
        rate += 1 / each
    return level_s + left / rate


def _check_enough(total: int, count: int, least: int = 1) -> None:
    if count < 1 or total < least * count:
        raise ValueError(f"{total} can't be shared by {count} with at least {least} each")
