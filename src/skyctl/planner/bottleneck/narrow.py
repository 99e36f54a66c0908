"""Objective ``bottleneck``, exact: bisect the limit, then prove that nothing is strictly below the best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from skyctl.planner.evaluate import bottleneck_s
from skyctl.planner.model import Model, Piece

Pieces = tuple[Piece, ...]
Cover = Callable[[float, bool], "Pieces | None"]
"""(limit, strict) → a plan within it, or None: there is none (proved). TimeoutError when undecided."""


def narrow(
    model: Model, best: Pieces | None, cover: Cover, low: float, deadline: float
) -> tuple[Pieces | None, float, bool]:
    """(best plan, valid lower bound, proved).

    ``low``: a bound to begin with. ``best`` None and the first cover without a limit empty: nothing fits,
    proved (bound infinite).
    """
    try:
        if best is None:
            best = cover(math.inf, False)
            if best is None:
                return None, math.inf, True
        while True:
            value = bottleneck_s(model, best)
            if value - low <= 1e-6 * value:
                target, strict = value, True
            else:
                target, strict = (low + value) / 2, False
            if time.perf_counter() > deadline:
                return best, low, False
            found = cover(target, strict)
            if found is not None:
                best = found
            elif strict:
                return best, value, True
            else:
                low = target
    except TimeoutError:
        return best, low, False
