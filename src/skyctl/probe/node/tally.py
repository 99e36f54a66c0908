"""All repetitions of all layers, and how well each layer's mean is known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from skyctl.probe.node.clock import Sample, interval
from skyctl.probe.node.weights import Backwards

AIM = 0.02
"""A layer is measured on until its mean is known within this, or the time is spent. Users are told of what is
worse than ``STEADY_INTERVAL``: ratios of two times are then within 3% of what they would be for ever."""


@dataclass
class Tally:
    """All repetitions so far, by layer index and microbatch size; size 0 is the optimizer's step.

    ``splits``: of the backward alone, cut in two (see ``weights``). ``blocks``: how many of the samples are
    judged together.
    """

    samples: dict[tuple[int, int], list[Sample]] = field(default_factory=dict)
    blocks: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    splits: dict[tuple[int, int], Backwards] = field(default_factory=dict)
    skipped: dict[tuple[int, int], str] = field(default_factory=dict)

    def add(self, index: int, size: int, samples: Sequence[Sample], blocks: Sequence[int]) -> None:
        """Joins new repetitions to those there are."""
        self.samples.setdefault((index, size), []).extend(samples)
        self.blocks.setdefault((index, size), []).extend(blocks)

    def cut(self, index: int, size: int) -> list[Sample]:
        """Repetitions of its backward in two parts."""
        found = self.splits.get((index, size))
        return [] if found is None else found.cut

    def interval(self, key: tuple[int, int], by_cpu: bool) -> float:
        """How well its mean is known (``clock.interval``)."""
        return interval(self.samples[key], by_cpu, self.blocks[key])

    def mean_s(self, key: tuple[int, int]) -> float:
        """Wall seconds of a repetition."""
        samples = self.samples[key]
        return sum(sample.wall_s for sample in samples) / len(samples)

    def drop(self, key: tuple[int, int]) -> None:
        """Forgets it."""
        self.samples.pop(key, None)
        self.blocks.pop(key, None)

    def unsteady(self, keys: Collection[tuple[int, int]], by_cpu: bool) -> set[tuple[int, int]]:
        """Those of them whose mean is not known well enough yet.

        A layer of next to nothing is, when what is not known of it is little beside the others' mean.
        """
        found = {key: self.mean_s(key) for key in keys if key in self.samples}
        allowed_s = {
            size: AIM * fmean(mean_s for (_, other), mean_s in found.items() if other == size)
            for size in {size for _, size in found}
        }
        rough = set()
        for key, mean_s in found.items():
            half = self.interval(key, by_cpu)
            if half > AIM and not half * mean_s <= allowed_s[key[1]]:
                rough.add(key)
        return rough
