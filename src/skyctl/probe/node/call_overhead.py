"""Call overhead: what a stage's forward and backward take whatever their layers, in seconds a microbatch.

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

from skyctl.probe.node.layer_windows import LayerWindow
from skyctl.probe.node.repetition_timer import Repetition, RepetitionTimer
from skyctl.probe.node.samples import LEAST_OWN_SHARE, TimingSample, trimmed_error, trimmed_mean

CHEAP_S = 0.01
"""If a layer takes more, the overhead is lost in it, and does not matter."""
ENOUGH_SHARE = 0.03
"""The overhead is known well enough within this part of a layer (one standard error)."""
MIN_ROUNDS = 5
"""Fewer don't tell how far they are apart."""
SIGNIFICANCE = 1.0
"""So many standard errors the overhead must be above nothing. Being wrong either way costs alike: what is
taken off the layers for nothing comes back with each stage."""


@dataclass
class CallOverhead:
    """The call overhead as one window shows it, run as a whole and then layer by layer, over and over.

    A processor changes its speed from second to second, by more than what is looked for: only what was run
    right after the other is compared with it.

    Args:
        window: two layers at least.
        size: samples of a microbatch.
    """

    window: LayerWindow
    size: int
    _rounds: list[tuple[TimingSample, ...]] = field(default_factory=list)
    """By round, the sample of the whole window and those of its layers one at a time."""

    def measure(
        self,
        timer: RepetitionTimer,
        repetition_of: Callable[[int, int], Repetition],
        slice_s: float,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Adds one round at least, for about ``slice_s`` seconds; a round before them is warm-up.

        Args:
            repetition_of: gives the repetition of the window's layers from one position to another.
            over: whether to end now.
        """
        count = len(self.window.kinds)
        parts = [repetition_of(0, count), *(repetition_of(at, at + 1) for at in range(count))]
        end = time.perf_counter() + slice_s
        for number in itertools.count():
            samples = []
            for part in parts:
                samples.append(timer.sample(part))
                if over():
                    return
            if number:
                self._rounds.append(tuple(samples))
                if time.perf_counter() >= end:
                    return

    def seconds(self, by_cpu: bool) -> float:
        """The overhead by that clock; 0 where it is hardly above its error, never all of a window's time."""
        mean_s, error_s = self._mean_and_error(by_cpu)
        most_s = (1 - LEAST_OWN_SHARE) * self._whole_s(by_cpu)
        return min(mean_s, most_s) if mean_s > SIGNIFICANCE * error_s else 0.0

    def known(self, by_cpu: bool) -> bool:
        """Whether the overhead is known within ``ENOUGH_SHARE`` of a layer."""
        return self._mean_and_error(by_cpu)[1] <= ENOUGH_SHARE * self._whole_s(by_cpu) / len(
            self.window.kinds
        )

    def _whole_s(self, by_cpu: bool) -> float:
        samples = sorted(_sample_s(whole, by_cpu) for whole, *_ in self._rounds)
        return trimmed_mean(samples) if samples else 0.0

    def _mean_and_error(self, by_cpu: bool) -> tuple[float, float]:
        """(seconds of overhead, their standard error; inf: not known)."""
        if len(self._rounds) < MIN_ROUNDS:
            return 0.0, math.inf
        more = sorted(
            sum(_sample_s(part, by_cpu) for part in alone) - _sample_s(whole, by_cpu)
            for whole, *alone in self._rounds
        )
        fewer = len(self.window.kinds) - 1
        return trimmed_mean(more) / fewer, trimmed_error(more) / fewer


def _sample_s(sample: TimingSample, by_cpu: bool) -> float:
    return sample.cpu_s if by_cpu else sample.wall_s


def choose_window(
    rounds: Sequence[tuple[int, LayerWindow]], seconds: Callable[[int, LayerWindow], float]
) -> CallOverhead | None:
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
    cheap = [candidate for candidate in cheap if candidate[1] <= CHEAP_S * len(candidate[2].kinds)]
    return CallOverhead(min(cheap, key=lambda candidate: candidate[:2])[2], least) if cheap else None
