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


Key = tuple[int, int]
"""Layer index and microbatch size; size 0 is the optimizer's step."""

LEAST_OWN = 0.25
"""So much of its time is a layer's own at least, however little it does."""

ENOUGH = 5
"""So many blocks measured with all others are taken by themselves."""


@dataclass
class Repetitions:
    """Of one layer, or of several together.

    ``blocks``: how many of the samples are judged together; ``windows``: of all layers run with each.
    """

    samples: list[Sample] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    windows: list[Sample] = field(default_factory=list)


@dataclass
class Tally:
    """All repetitions so far; those since ``count`` by themselves where there are enough.

    A machine that several devices share changes its speed within seconds: what was measured in other
    seconds than the others' does not compare with theirs.

    ``splits``: of the backward alone, cut in two (see ``weights``).
    """

    _all: dict[Key, Repetitions] = field(default_factory=dict)
    _counted: dict[Key, Repetitions] | None = None
    splits: dict[Key, Backwards] = field(default_factory=dict)
    skipped: dict[Key, str] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return bool(self._all)

    def count(self) -> None:
        """From now on all devices are at it."""
        self._counted = {}

    def add(
        self, key: Key, samples: Sequence[Sample], blocks: Sequence[int], windows: Sequence[Sample] = ()
    ) -> None:
        """Joins new repetitions to those there are."""
        for kept in (self._all, self._counted):
            if kept is not None:
                found = kept.setdefault(key, Repetitions())
                found.samples.extend(samples)
                found.blocks.extend(blocks)
                found.windows.extend(windows)

    def _of(self, key: Key) -> Repetitions:
        counted = (self._counted or {}).get(key)
        if counted is not None and len(counted.blocks) >= ENOUGH:
            return counted
        return self._all.get(key) or Repetitions()

    def of(self, key: Key) -> list[Sample]:
        """Those that its figures are made of."""
        return self._of(key).samples

    def blocks_of(self, key: Key) -> list[int]:
        """How many of them are judged together."""
        return self._of(key).blocks

    def within(self, key: Key, action_s: float, by_cpu: bool) -> float:
        """What part of its seconds is its own, where each repetition of a window takes ``action_s`` more."""
        whole = [one.cpu_s if by_cpu else one.wall_s for one in self._of(key).windows]
        return max(LEAST_OWN, 1.0 - action_s / fmean(whole)) if sum(whole) > 0 else 1.0

    def cut(self, index: int, size: int) -> list[Sample]:
        """Repetitions of its backward in two parts."""
        found = self.splits.get((index, size))
        return [] if found is None else found.cut

    def interval(self, key: Key, by_cpu: bool) -> float:
        """How well its mean is known (``clock.interval``)."""
        return interval(self.of(key), by_cpu, self.blocks_of(key))

    def mean_s(self, key: Key) -> float:
        """Wall seconds of a repetition."""
        samples = self.of(key)
        return sum(sample.wall_s for sample in samples) / len(samples)

    def drop(self, key: Key) -> None:
        """Forgets it."""
        for kept in (self._all, self._counted):
            if kept is not None:
                kept.pop(key, None)

    def unsteady(self, keys: Collection[Key], by_cpu: bool) -> set[Key]:
        """Those of them whose mean is not known well enough yet.

        A layer of next to nothing is, when what is not known of it is little beside the others' mean.
        """
        found = {key: self.mean_s(key) for key in keys if key in self._all}
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
