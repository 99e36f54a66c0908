"""What a stage's forward and backward take whatever their layers: seconds a microbatch.

Autograd is entered and left, Python is called, and caches have gone cold since the last time. Layers in
company share it, so a stage of one cheap layer takes more than its part of a window says. Layers of a window
are run one at a time as well: k of them by themselves take k − 1 times as much of it more than together.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skyctl.probe.node.clock import Meter, Sample, Steps, block_sizes, collect
from skyctl.probe.node.tally import LEAST_OWN
from skyctl.probe.node.windows import Window

CHEAP_S = 0.01
"""Where a layer takes more, what is looked for is lost in it, and does not matter."""
ENOUGH = 0.03
SURE = 2.0
"""So many standard errors it must be above nothing."""


@dataclass
class Entering:
    """One window, run as a whole and layer by layer in turn.

    Args:
        window: two layers at least.
        size: samples of a microbatch.
    """

    window: Window
    size: int
    _together: list[Sample] = field(default_factory=list)
    """Means of blocks of repetitions."""
    _alone: dict[int, list[Sample]] = field(default_factory=dict)
    """The same of each kind's."""

    def measure(
        self,
        meter: Meter,
        steps: Callable[[int, int], Steps],
        slice_s: float,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Once more, in about so many seconds.

        Args:
            steps: gives the repetitions of the window's layers from one position to another.
            over: whether to end now.
        """
        firsts = {kind: at for at, kind in reversed(list(enumerate(self.window.kinds)))}
        each_s = slice_s / (1 + len(firsts))
        self._together += _blocks(meter, steps(0, len(self.window.kinds)), each_s, over)
        for kind, at in firsts.items():
            self._alone.setdefault(kind, []).extend(_blocks(meter, steps(at, at + 1), each_s, over))

    def seconds(self, by_cpu: bool) -> float:
        """By that clock; 0 where it can't be told from nothing, and never so much that no layer is left."""
        found = self._found(by_cpu)
        if found is None or found[0] <= SURE * found[1]:
            return 0.0
        return min(found[0], (1 - LEAST_OWN) * _mean(self._together, by_cpu))

    def known(self, by_cpu: bool) -> bool:
        """Whether it is known within ``ENOUGH`` of a layer."""
        found = self._found(by_cpu)
        if found is None:
            return False
        return found[1] <= ENOUGH * _mean(self._together, by_cpu) / len(self.window.kinds)

    def _found(self, by_cpu: bool) -> tuple[float, float] | None:
        """(seconds, their standard error)."""
        times = Counter(self.window.kinds)
        if min(len(self._together), *(len(self._alone.get(kind, ())) for kind in times)) < 2:
            return None
        more = sum(n * _mean(self._alone[kind], by_cpu) for kind, n in times.items())
        errors = [_error(self._together, by_cpu)]
        errors += [n * _error(self._alone[kind], by_cpu) for kind, n in times.items()]
        fewer = len(self.window.kinds) - 1
        return (more - _mean(self._together, by_cpu)) / fewer, math.hypot(*errors) / fewer


def chosen(rounds: Sequence[tuple[int, Window]], seconds: Callable[[int, Window], float]) -> Entering | None:
    """Of the windows at the smallest size the longest, the cheapest of these; None: no cheap ones.

    Args:
        rounds: (samples of a microbatch, window).
        seconds: of a window's layers, together.
    """
    least = min((size for size, _ in rounds), default=0)
    cheap = [
        (-len(window.kinds), seconds(size, window), window)
        for size, window in rounds
        if size == least and len(window.kinds) > 1
    ]
    cheap = [one for one in cheap if one[1] <= CHEAP_S * len(one[2].kinds)]
    return Entering(min(cheap, key=lambda one: one[:2])[2], least) if cheap else None


def _blocks(meter: Meter, steps: Steps, slice_s: float, over: Callable[[], bool]) -> list[Sample]:
    samples = collect(meter, steps, slice_s=slice_s, over=over)
    means = []
    start = 0
    for count in block_sizes(samples, meter.by_cpu):
        columns = zip(*samples[start : start + count], strict=True)
        means.append(Sample(*(statistics.fmean(column) for column in columns)))
        start += count
    return means


def _mean(means: Sequence[Sample], by_cpu: bool) -> float:
    return statistics.fmean(one.cpu_s if by_cpu else one.wall_s for one in means)


def _error(means: Sequence[Sample], by_cpu: bool) -> float:
    return statistics.stdev(one.cpu_s if by_cpu else one.wall_s for one in means) / math.sqrt(len(means))
