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
from skyctl.probe.node.windows import Window

CHEAP_S = 0.01
"""Where a layer takes more, what is looked for is lost in it, and does not matter."""
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
    _together: list[float] = field(default_factory=list)
    """Seconds of each block of repetitions."""
    _alone: dict[int, list[float]] = field(default_factory=dict)
    """The same of each kind's."""

    def measure(self, meter: Meter, steps: Callable[[int, int], Steps], slice_s: float) -> None:
        """Once more, in about so many seconds.

        Args:
            steps: gives the repetitions of the window's layers from one position to another.
        """
        firsts = {kind: at for at, kind in reversed(list(enumerate(self.window.kinds)))}
        each_s = slice_s / (1 + len(firsts))
        self._together += _blocks(meter, steps(0, len(self.window.kinds)), each_s)
        for kind, at in firsts.items():
            self._alone.setdefault(kind, []).extend(_blocks(meter, steps(at, at + 1), each_s))

    @property
    def seconds(self) -> float:
        """By the clock that layers are judged by; 0 where it can't be told from nothing."""
        times = Counter(self.window.kinds)
        if min(len(self._together), *(len(self._alone.get(kind, ())) for kind in times)) < 2:
            return 0.0
        more = sum(n * statistics.fmean(self._alone[kind]) for kind, n in times.items())
        more -= statistics.fmean(self._together)
        error = math.hypot(
            _error(self._together), *(n * _error(self._alone[kind]) for kind, n in times.items())
        )
        return more / (len(self.window.kinds) - 1) if more > SURE * error else 0.0


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


def _blocks(meter: Meter, steps: Steps, slice_s: float) -> list[float]:
    samples: list[Sample] = collect(meter, steps, slice_s=slice_s)
    means = []
    start = 0
    for count in block_sizes(samples, meter.by_cpu):
        block = samples[start : start + count]
        means.append(statistics.fmean(s.cpu_s if meter.by_cpu else s.wall_s for s in block))
        start += count
    return means


def _error(means: Sequence[float]) -> float:
    return statistics.stdev(means) / math.sqrt(len(means))
