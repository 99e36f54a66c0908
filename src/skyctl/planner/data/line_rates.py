"""How fast a device's lines are: one link with what it shares, and all of its links at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyctl.planner.data.holder_costs import DataModel, DevicePair


def line_byte_s(model: DataModel, source: int, target: int) -> float:
    """Seconds that a byte takes on the slowest of a link and its shared resources."""
    pair = (source, target)
    return max((model.byte_s.get(pair, 0.0), *(seconds for _, seconds in model.shared.get(pair, ()))))


def lines_rate(model: DataModel, pairs: Sequence[DevicePair]) -> float:
    """The most bytes a second over links all at once; one resource that some of them share is looked at."""
    rates = []
    over: dict[int, tuple[float, float]] = {}
    for pair in pairs:
        byte_s = line_byte_s(model, *pair)
        rate = 1 / byte_s if byte_s > 0 else math.inf
        rates.append(rate)
        for number, seconds in model.shared.get(pair, ()):
            over[number] = (1 / seconds, over.get(number, (0.0, 0.0))[1] + rate)
    total = math.fsum(rates)
    least = total
    for number, (most, through) in over.items():
        if most < through:
            apart = [r for r, pair in zip(rates, pairs, strict=True) if not _is_over(model, pair, number)]
            least = min(least, most + math.fsum(apart))
    return least


def _is_over(model: DataModel, pair: DevicePair, number: int) -> bool:
    return any(shared == number for shared, _ in model.shared.get(pair, ()))
