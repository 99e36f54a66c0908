"""What a stage's forward and backward take whatever their layers: seconds a microbatch.

Autograd is entered and left, Python is called, and caches have gone cold since the last time. Layers in
company share it, so a stage of one cheap layer takes more than its part of a window says. Layers of a window
are run one at a time as well: k of them by themselves take k − 1 times as much of it more than together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skyctl.probe.node.clock import Meter, Steps, block_sizes, collect
from skyctl.probe.node.tally import LEAST_OWN, Repetitions
from skyctl.probe.node.windows import Window

CHEAP_S = 0.01
"""Where a layer takes more, what is looked for is lost in it, and does not matter."""
ENOUGH = 0.03
"""It is known well enough within this part of a layer (one standard error)."""
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
    _together: Repetitions = field(default_factory=Repetitions)
    _alone: dict[int, Repetitions] = field(default_factory=dict)
    """By kind."""

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
        parts = [(self._together, 0, len(self.window.kinds))]
        parts += [(self._alone.setdefault(kind, Repetitions()), at, at + 1) for kind, at in firsts.items()]
        for kept, start, stop in parts:
            samples = collect(meter, steps(start, stop), slice_s=slice_s / len(parts), over=over)
            kept.samples += samples
            kept.blocks += block_sizes(samples, meter.by_cpu)

    def seconds(self, by_cpu: bool) -> float:
        """By that clock; 0 where it can't be told from nothing, and never so much that no layer is left."""
        found_s, error_s = self._found(by_cpu)
        most_s = (1 - LEAST_OWN) * self._together.mean(by_cpu)[0]
        return min(found_s, most_s) if found_s > SURE * error_s else 0.0

    def known(self, by_cpu: bool) -> bool:
        """Whether it is known within ``ENOUGH`` of a layer."""
        layer_s = self._together.mean(by_cpu)[0] / len(self.window.kinds)
        return self._found(by_cpu)[1] <= ENOUGH * layer_s

    def _found(self, by_cpu: bool) -> tuple[float, float]:
        """(seconds, their standard error)."""
        whole_s, error_s = self._together.mean(by_cpu)
        more_s, errors = -whole_s, [error_s]
        for kind, times in Counter(self.window.kinds).items():
            each_s, error_s = self._alone.get(kind, Repetitions()).mean(by_cpu)
            more_s += times * each_s
            errors.append(times * error_s)
        fewer = len(self.window.kinds) - 1
        return more_s / fewer, math.hypot(*errors) / fewer


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
