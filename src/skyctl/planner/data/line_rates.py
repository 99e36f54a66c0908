"""How fast a device's lines are: one link with what it shares, and all of its links at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from skyctl.planner.data.holder_costs import DataModel, DevicePair


def line_byte_s(model: DataModel, source: int, target: int) -> float:
    """Seconds that a byte takes on the slowest of a link and its shared resources."""
    pair = (source, target)
    return max((model.byte_s.get(pair, 0.0), *(seconds for _, seconds in model.shared.get(pair, ()))))


def lines_rate(model: DataModel, pairs: Sequence[DevicePair]) -> float:
    """The most bytes a second over links all at once; one resource that some of them share is looked at."""
    lines = [model.lines[pair] for pair in pairs]
    through: dict[int, float] = {}
    most: dict[int, float] = {}
    for line in lines:
        for number, rate in line.shared.items():
            through[number] = through.get(number, 0.0) + line.rate
            most[number] = rate
    least = math.fsum(line.rate for line in lines)
    for number, rate in most.items():
        if rate < through[number]:
            apart = math.fsum(line.rate for line in lines if number not in line.shared)
            least = min(least, rate + apart)
    return least


class Line(NamedTuple):
    """A directed link: its bytes a second, and those of the resources that it shares, by their numbers."""

    rate: float
    shared: Mapping[int, float]


def lines_of(model: DataModel) -> dict[DevicePair, Line]:
    """The links between all pairs of devices."""
    found = {}
    for source, target in permutations(range(len(model.ids)), 2):
        byte_s = line_byte_s(model, source, target)
        shared = {number: 1 / seconds for number, seconds in model.shared.get((source, target), ())}
        found[source, target] = Line(1 / byte_s if byte_s > 0 else math.inf, shared)
    return found
