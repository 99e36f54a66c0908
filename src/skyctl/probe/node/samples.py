"""Samples of repetitions: their means, how well these are known, and what they say of each layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

MIN_REPEATS = 3
CONVERGED_INTERVAL = 0.03
"""Relative 95% interval within which a layer's mean is told as known (``TARGET_INTERVAL`` is aimed at)."""

BLOCK_S = 0.02
"""Short repetitions are judged in blocks of about this much time, longer ones singly."""

TRIMMED, MIN_TRIMMED = 0.1, 5
"""So many of the blocks are left out at each end, one at least where there are so many (``trimmed_mean``)."""


class TimingSample(NamedTuple):
    """One repetition, in seconds of the wall's and of the CPU's clock (0 on an accelerator)."""

    forward_s: float
    forward_cpu_s: float
    backward_s: float
    backward_cpu_s: float

    def with_shares(self, forward: float, backward: float) -> TimingSample:
        """The sample of a layer that had these shares of its two parts."""
        return TimingSample(
            self.forward_s * forward,
            self.forward_cpu_s * forward,
            self.backward_s * backward,
            self.backward_cpu_s * backward,
        )

    @property
    def wall_s(self) -> float:
        """Wall seconds of both parts."""
        return self.forward_s + self.backward_s

    @property
    def cpu_s(self) -> float:
        """CPU seconds of both parts."""
        return self.forward_cpu_s + self.backward_cpu_s


def block_sizes(samples: Sequence[TimingSample], cpu: bool) -> list[int]:
    """How many consecutive repetitions make blocks of at least ``BLOCK_S``; the rest joins the last one."""
    sizes = [0]
    held_s = 0.0
    for sample in samples:
        if held_s >= BLOCK_S:
            sizes.append(0)
            held_s = 0.0
        sizes[-1] += 1
        held_s += sample.cpu_s if cpu else sample.wall_s
    if len(sizes) > 1 and held_s < BLOCK_S:
        rest = sizes.pop()
        sizes[-1] += rest
    return sizes


def _block_means(
    samples: Sequence[TimingSample], cpu: bool, sizes: Sequence[int] | None = None
) -> list[float]:
    """Seconds of a repetition by block, by the CPU's clock or the wall's; ``sizes`` as for ``interval``."""
    means = []
    start = 0
    for count in block_sizes(samples, cpu) if sizes is None else sizes:
        block = samples[start : start + count]
        means.append(sum(sample.cpu_s if cpu else sample.wall_s for sample in block) / count)
        start += count
    return means


def sample_interval(samples: Sequence[TimingSample], cpu: bool, sizes: Sequence[int] | None = None) -> float:
    """Half of the 95% interval (two standard errors) of the blocks' mean, relative to it; inf: not known.

    Args:
        sizes: of the blocks, where they are not the samples' own (those of the window they are a part of).
    """
    return relative_interval(_block_means(samples, cpu, sizes))


def relative_interval(means: Sequence[float]) -> float:
    """Half of the 95% interval of a repeated figure's mean, relative to it; inf: not known."""
    if len(means) < MIN_REPEATS:
        return math.inf
    mean = statistics.fmean(means)
    return 2 * statistics.stdev(means) / math.sqrt(len(means)) / mean if mean > 0 else math.inf


def converged(samples: Sequence[TimingSample], cpu: bool) -> bool:
    """Whether the mean of the blocks is known within ``CONVERGED_INTERVAL``."""
    return sample_interval(samples, cpu) <= CONVERGED_INTERVAL


@dataclass(frozen=True)
class Estimate:
    """Seconds per repetition; ``spread``: (p90 − p10) / median of the blocks.

    ``interval``: half of the 95% interval, relative; None where there are too few blocks to tell.
    """

    forward_s: float
    backward_s: float
    spread: float
    repeats: int
    interval: float | None


def estimate(
    samples: Sequence[TimingSample], wall_cpu_ratio: float | None, sizes: Sequence[int] | None = None
) -> Estimate:
    """The estimate of what one repetition takes, from all its samples.

    Args:
        sizes: of the blocks, as for ``sample_interval``.
        wall_cpu_ratio: wall seconds per CPU second on this device (``RepetitionTimer``), or None to go by the
            wall clock alone: then it is the mean, which holds stalls in their proportion.
    """
    cpu = wall_cpu_ratio is not None
    means = sorted(_block_means(samples, cpu, sizes))
    half = relative_interval(means)
    median = statistics.median(means)
    spread = (_quantile(means, 0.9) - _quantile(means, 0.1)) / median if median > 0 else 0.0
    if wall_cpu_ratio is not None:
        total_s = trimmed_mean(means) * wall_cpu_ratio
        forward = sum(s.forward_cpu_s for s in samples)
        both = sum(s.cpu_s for s in samples)
    else:
        both = sum(s.wall_s for s in samples)
        total_s = both / len(samples)
        forward = sum(s.forward_s for s in samples)
    share = forward / both if both > 0 else 1 / 3
    return Estimate(
        total_s * share,
        total_s * (1 - share),
        spread,
        len(samples),
        half if math.isfinite(half) else None,
    )


def trimmed_mean(ordered: Sequence[float]) -> float:
    """The mean without the least and the greatest tenth, at least one each where there are five.

    Not the median: of a processor that has one of two speeds for seconds each, that is the one which it
    had for a little longer.
    """
    out = _left_out(len(ordered))
    return statistics.fmean(ordered[out : len(ordered) - out])


def trimmed_error(ordered: Sequence[float]) -> float:
    """The standard error of ``trimmed_mean``; two values at least, in order.

    Source: Tukey and McLaughlin 1963: what is left out counts as the last that is not.
    """
    count = len(ordered)
    out = _left_out(count)
    kept = [min(max(value, ordered[out]), ordered[count - 1 - out]) for value in ordered]
    return statistics.stdev(kept) * math.sqrt(count) / (count - 2 * out)


def _left_out(count: int) -> int:
    """How many of so many values a trimmed mean leaves out at each end."""
    return max(int(count * TRIMMED), int(count >= MIN_TRIMMED))


def _quantile(ordered: Sequence[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass
class SplitSamples:
    """Repetitions of one layer's backward: whole, and in two parts (as forward and backward of a sample)."""

    whole: list[TimingSample] = field(default_factory=list)
    split: list[TimingSample] = field(default_factory=list)

    def ratio(self, on_cpu: bool) -> float:
        """The time of both parts over the whole backward's, by their medians, because samples are few."""
        whole = median(s.backward_cpu_s if on_cpu else s.backward_s for s in self.whole)
        return median(s.cpu_s if on_cpu else s.wall_s for s in self.split) / whole if whole > 0 else 1.0

    def share(self, on_cpu: bool) -> float:
        """The second part's share of both: the weight gradients'."""
        first = median(s.forward_cpu_s if on_cpu else s.forward_s for s in self.split)
        second = median(s.backward_cpu_s if on_cpu else s.backward_s for s in self.split)
        return second / (first + second) if first + second > 0 else 0.0


TARGET_INTERVAL = 0.02
"""A layer is measured on until its mean is known within this, or the time is spent. Users are told of what is
worse than ``CONVERGED_INTERVAL``: ratios of two times are then within 3% of what they would be for ever."""


LayerKey = tuple[int, int]
"""Layer index and microbatch size; size 0 is the optimizer's step."""

LEAST_OWN_SHARE = 0.25
"""So much of its time is a layer's own at least, however little it does."""

ENOUGH_BLOCKS = 5
"""So many blocks measured with all others are taken by themselves."""


@dataclass
class SampleSeries:
    """The samples of one layer at one microbatch size.

    ``blocks``: how many consecutive samples are judged together. ``windows``: by sample, that of the whole
    window that the layer was run in.
    """

    samples: list[TimingSample] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    windows: list[TimingSample] = field(default_factory=list)


@dataclass
class LayerSamples:
    """The samples of all layers; those since ``start_counting`` by themselves where there are enough.

    A machine that several devices share changes its speed within seconds: what was measured in other
    seconds than the others' does not compare with theirs.

    ``splits``: of the backward in two parts. ``skipped``: why a layer has no samples.
    """

    _all: dict[LayerKey, SampleSeries] = field(default_factory=dict)
    _counted: dict[LayerKey, SampleSeries] | None = None
    splits: dict[LayerKey, SplitSamples] = field(default_factory=dict)
    skipped: dict[LayerKey, str] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether any layer has samples."""
        return bool(self._all)

    def start_counting(self) -> None:
        """From now on all devices measure at the same time."""
        self._counted = {}

    def add(
        self,
        key: LayerKey,
        samples: Sequence[TimingSample],
        blocks: Sequence[int],
        windows: Sequence[TimingSample] = (),
    ) -> None:
        """Adds samples of a layer to those it has."""
        for kept in (self._all, self._counted):
            if kept is not None:
                series = kept.setdefault(key, SampleSeries())
                series.samples.extend(samples)
                series.blocks.extend(blocks)
                series.windows.extend(windows)

    def _series(self, key: LayerKey) -> SampleSeries:
        counted = (self._counted or {}).get(key)
        if counted is not None and len(counted.blocks) >= ENOUGH_BLOCKS:
            return counted
        return self._all.get(key) or SampleSeries()

    def samples_of(self, key: LayerKey) -> list[TimingSample]:
        """The samples that a layer's figures are made of."""
        return self._series(key).samples

    def blocks_of(self, key: LayerKey) -> list[int]:
        """How many consecutive ones of ``samples_of`` are judged together, block by block."""
        return self._series(key).blocks

    def own_share(self, key: LayerKey, action_s: float, by_cpu: bool) -> float:
        """The part of a layer's seconds that is its own, where each call of a window takes ``action_s``."""
        whole = [window.cpu_s if by_cpu else window.wall_s for window in self._series(key).windows]
        return max(LEAST_OWN_SHARE, 1.0 - action_s / fmean(whole)) if sum(whole) > 0 else 1.0

    def split_samples(self, index: int, size: int) -> list[TimingSample]:
        """The samples of a layer's backward in two parts."""
        split_samples = self.splits.get((index, size))
        return [] if split_samples is None else split_samples.split

    def interval(self, key: LayerKey, by_cpu: bool) -> float:
        """How well a layer's mean is known, as ``sample_interval`` says."""
        return sample_interval(self.samples_of(key), by_cpu, self.blocks_of(key))

    def mean_s(self, key: LayerKey) -> float:
        """Mean wall seconds of a layer's repetition."""
        samples = self.samples_of(key)
        return sum(sample.wall_s for sample in samples) / len(samples)

    def drop(self, key: LayerKey) -> None:
        """Forgets a layer's samples."""
        for kept in (self._all, self._counted):
            if kept is not None:
                kept.pop(key, None)

    def unconverged(self, keys: Collection[LayerKey], by_cpu: bool) -> set[LayerKey]:
        """The layers whose mean is not known well enough yet.

        A layer that takes next to nothing has converged when its uncertainty is small against the mean layer.
        """
        means = {key: self.mean_s(key) for key in keys if key in self._all}
        allowed_s = {
            size: TARGET_INTERVAL * fmean(mean_s for (_, other), mean_s in means.items() if other == size)
            for size in {size for _, size in means}
        }
        unconverged = set()
        for key, mean_s in means.items():
            half = self.interval(key, by_cpu)
            if half > TARGET_INTERVAL and not half * mean_s <= allowed_s[key[1]]:
                unconverged.add(key)
        return unconverged


MOST_SPLIT_RATIO = 2.0
"""A backward in two parts takes so many times as long as a whole one at most; more was a disturbance."""
NO_TIME = "there was no time for it"


@dataclass(frozen=True)
class ClockScale:
    """``wall_cpu_ratio``: seconds of the node for one by the CPU's clock, None: times are the wall's already.

    ``interval``: how well that is known, relative. ``by_cpu``: whether repetitions are judged by the CPU's.
    """

    wall_cpu_ratio: float | None
    by_cpu: bool
    interval: float


def timing_figures(
    layer_samples: LayerSamples,
    key: LayerKey,
    clock: ClockScale,
    action_s: float,
    update_call_s: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Any]:
    """``LayerTiming``'s figures of a layer at a size, or why there are none.

    Args:
        action_s: what a stage's forward and backward take whatever their layers, of the CPU's seconds where
            there is a wall_cpu_ratio: it is taken off what a window of layers took.
        update_call_s: what an optimizer's step takes whatever its parameters, which is taken off, and the
            layer's share of the one step that a stage makes.
    """
    samples, parts = layer_samples.samples_of(key), layer_samples.splits.get(key)
    if not samples:
        return {"skipped": layer_samples.skipped.get(key, NO_TIME)}
    estimated = estimate(samples, clock.wall_cpu_ratio, layer_samples.blocks_of(key))
    updates = layer_samples.samples_of((key[0], 0))
    own = layer_samples.own_share(key, action_s, clock.wall_cpu_ratio is not None)
    update_s = estimate(updates, clock.wall_cpu_ratio).forward_s if updates else 0.0
    split_s = weight_s = None
    if parts:  # few repetitions, so not out of proportion to the whole
        split_s = estimated.backward_s * own * min(max(1.0, parts.ratio(clock.by_cpu)), MOST_SPLIT_RATIO)
        weight_s = split_s * parts.share(clock.by_cpu)
    return {
        "forward_s": estimated.forward_s * own,
        "backward_s": estimated.backward_s * own,
        "optimizer_s": max(0.0, update_s - update_call_s[0]) + update_call_s[1] if updates else 0.0,
        "weight_s": weight_s,
        "split_s": split_s,
        "spread": estimated.spread,
        "repeats": estimated.repeats,
        "interval": estimated.interval and math.hypot(estimated.interval, clock.interval),
    }
