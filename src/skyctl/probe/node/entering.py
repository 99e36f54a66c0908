"""What a stage's forward and backward take whatever their layers: seconds a microbatch.

Autograd is entered and left, Python is called, and caches have gone cold since the last time. Layers in
company share it, so a stage of one cheap layer takes more than its part of a window says. Layers of a window
are run one at a time as well: k of them by themselves take k − 1 times as much of it more than together.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skyctl.probe.node.clock import Meter, Sample, Steps, trimmed_error, trimmed_mean
from skyctl.probe.node.tally import LEAST_OWN
from skyctl.probe.node.windows import Window

CHEAP_S = 0.01
"""Where a layer takes more, what is looked for is lost in it, and does not matter."""
ENOUGH = 0.03
"""It is known well enough within this part of a layer (one standard error)."""
MIN_ROUNDS = 5
"""Fewer don't tell how far they are apart."""
SURE = 1.0
"""So many standard errors it must be above nothing. Being wrong either way costs alike: what is taken off the
layers for nothing comes back with each stage."""


@dataclass
class Entering:
    """One window, run as a whole and then layer by layer, over and over.

    A processor changes its speed from second to second, by more than what is looked for: only what was run
    right after the other is compared with it.

    Args:
        window: two layers at least.
        size: samples of a microbatch.
    """

    window: Window
    size: int
    _rounds: list[tuple[Sample, ...]] = field(default_factory=list)
    """The whole, and each of its layers by itself."""

    def measure(
        self,
        meter: Meter,
        steps: Callable[[int, int], Steps],
        slice_s: float,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """One round more at least, in about so many seconds; one before them does not count.

        Args:
            steps: gives the repetitions of the window's layers from one position to another.
            over: whether to end now.
        """
        count = len(self.window.kinds)
        parts = [steps(0, count), *(steps(at, at + 1) for at in range(count))]
        end = time.perf_counter() + slice_s
        for number in itertools.count():
            found = []
            for part in parts:
                found.append(meter.sample(part))
                if over():
                    return
            if number:
                self._rounds.append(tuple(found))
                if time.perf_counter() >= end:
                    return

    def seconds(self, by_cpu: bool) -> float:
        """By that clock; 0 where it is hardly told from nothing, and never so much that no layer is left."""
        found_s, error_s = self._found(by_cpu)
        most_s = (1 - LEAST_OWN) * self._whole_s(by_cpu)
        return min(found_s, most_s) if found_s > SURE * error_s else 0.0

    def known(self, by_cpu: bool) -> bool:
        """Whether it is known within ``ENOUGH`` of a layer."""
        return self._found(by_cpu)[1] <= ENOUGH * self._whole_s(by_cpu) / len(self.window.kinds)

    def _whole_s(self, by_cpu: bool) -> float:
        found = sorted(_seconds(whole, by_cpu) for whole, *_ in self._rounds)
        return trimmed_mean(found) if found else 0.0

    def _found(self, by_cpu: bool) -> tuple[float, float]:
        """(seconds, their standard error; inf: not known)."""
        if len(self._rounds) < MIN_ROUNDS:
            return 0.0, math.inf
        more = sorted(
            sum(_seconds(one, by_cpu) for one in alone) - _seconds(whole, by_cpu)
            for whole, *alone in self._rounds
        )
        fewer = len(self.window.kinds) - 1
        return trimmed_mean(more) / fewer, trimmed_error(more) / fewer


def _seconds(sample: Sample, by_cpu: bool) -> float:
    return sample.cpu_s if by_cpu else sample.wall_s


def chosen(rounds: Sequence[tuple[int, Window]], seconds: Callable[[int, Window], float]) -> Entering | None:
    """Of the windows at the smallest size the longest, the cheapest of these; None: no cheap ones.

    There must be room for two microbatches in flight: its layers are run together and singly.

    Args:
        rounds: (samples of a microbatch, window).
        seconds: of a window's layers, together.
    """
    least = min((size for size, _ in rounds), default=0)
    cheap = [
        (-len(window.kinds), seconds(size, window), window)
        for size, window in rounds
        if size == least and len(window.kinds) > 1 and window.in_flight > 1
    ]
    cheap = [one for one in cheap if one[1] <= CHEAP_S * len(one[2].kinds)]
    return Entering(min(cheap, key=lambda one: one[:2])[2], least) if cheap else None
