"""Water-filling: whole microbatches for each holder, so that the last one to finish finishes first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def level_shares(
    microbatch_s: Sequence[float], extra_s: Sequence[float], microbatches: int, least: int = 1
) -> tuple[int, ...] | None:
    """Shares m, ``least`` or more each, that add up to ``microbatches`` with the least max(m · t + e).

    One microbatch after the other goes to the holder that would be finished first with it; those that every
    solution gives out are given out at once.

    Args:
        microbatch_s: t, by holder.
        extra_s: e, by holder.

    Returns:
        None: there are fewer microbatches than ``least`` for each.
    """
    count = len(microbatch_s)
    left = microbatches - least * count
    if left < 0:
        return None
    level_s = level_in_parts_s(microbatch_s, extra_s, microbatches, least)
    # one less than the level allows: the level is rounded, and a share that is too large stays so
    shares = [
        max(least, math.floor(min(microbatches, (level_s - e) / t)) - 1) if t > 0 else least
        for t, e in zip(microbatch_s, extra_s, strict=True)
    ]
    if sum(shares) > microbatches:
        shares = [least] * count
    ends = [
        (e + (m + 1) * t, i) for i, (m, t, e) in enumerate(zip(shares, microbatch_s, extra_s, strict=True))
    ]
    heapq.heapify(ends)
    for _ in range(microbatches - sum(shares)):
        i = ends[0][1]
        shares[i] += 1
        heapq.heapreplace(ends, (extra_s[i] + (shares[i] + 1) * microbatch_s[i], i))
    return tuple(shares)


def level_in_parts_s(
    microbatch_s: Sequence[float], extra_s: Sequence[float], microbatches: int, least: int = 1
) -> float:
    """The least max(m · t + e), in seconds, if microbatches could be cut: a bound on that of whole ones.

    Holders begin to take more than ``least`` at the level e + least · t; arguments as in ``level_shares``.
    """
    ranked = sorted((e + least * t, t) for t, e in zip(microbatch_s, extra_s, strict=True))
    left = float(microbatches - least * len(ranked))
    if left <= 0:
        return ranked[-1][0]
    level_s, rate = ranked[0][0], 0.0
    for begins_s, t in ranked:
        taken = (begins_s - level_s) * rate
        if taken >= left:
            break
        level_s, left = begins_s, left - taken
        if t <= 0:
            return level_s
        rate += 1 / t
    return level_s + left / rate
