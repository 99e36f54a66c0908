"""Timing that holds under a CPU quota: repetitions in time slices, on the CPU clock and on the wall clock.

Under a quota a process runs for part of each period and is then held back to its end, so a short wall-clock
measurement sees either the bare speed or a stall. What a piece of work takes of the CPU is not disturbed by
that; how much wall time goes by per second of CPU time (the *stretch*: quota, neighbours, emulated slowdown)
is the same for all work on the device. So: per layer the CPU time per repetition, and the stretch over all
the time spent measuring, what lies between repetitions included: stalls are not spread over both evenly.
Two things would make it wrong, and are kept out of it (``stretches``): waiting for a disk while layers are
built, and time saved up under the quota before. Where all work is not stretched alike (several threads
without a quota that bites, or an accelerator), wall time per repetition is used as it is.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from skyctl.device.pace import Pace
from skyctl.probe.node.stretches import Stretches, scheduled

MIN_REPEATS = 3
STEADY_INTERVAL = 0.03
"""Enough is measured when the mean's 95% interval is within this fraction of it."""

BLOCK_S = 0.02
"""Short repetitions are judged in blocks of about this much time, longer ones singly."""

MAX_SAMPLES = 4000

TRIMMED, MIN_TRIMMED = 0.1, 5
"""So many of the blocks are left out at each end, one at least where there are so many (``trimmed_mean``)."""

BITES = 0.85
"""A quota holds several threads back where they get at least this part of it."""


WAITS = 0.1
"""Layers that wait for so much of their own time are timed by the wall clock."""


class Steps(Protocol):
    """One repetition in two parts that are timed, after one that is not."""

    def prepare(self) -> None:
        """Makes what the parts use up."""

    def forward(self) -> None:
        """The first part."""

    def between(self) -> None:
        """What happens between the two in training, not timed."""

    def backward(self) -> None:
        """The second part."""


class Sample(NamedTuple):
    """One repetition, seconds. CPU figures are 0 on an accelerator."""

    forward_s: float
    forward_cpu_s: float
    backward_s: float
    backward_cpu_s: float

    def part(self, forward: float, backward: float) -> Sample:
        """Such a share of its two parts."""
        return Sample(
            self.forward_s * forward,
            self.forward_cpu_s * forward,
            self.backward_s * backward,
            self.backward_cpu_s * backward,
        )

    @property
    def wall_s(self) -> float:
        """Both parts by the wall clock."""
        return self.forward_s + self.backward_s

    @property
    def cpu_s(self) -> float:
        """Both parts by the CPU clock."""
        return self.forward_cpu_s + self.backward_cpu_s


class Meter:
    """Clocks of one device: ``Pace`` over the two parts of a repetition.

    ``wall_s`` and ``cpu_s``: of all repetitions and of what was done between them. Where a slowdown is
    emulated, of the repetitions alone: the rest is not slowed. ``quota_cpus``: what the process may use of
    processors in the long run, None: all.
    """

    def __init__(
        self,
        device: str,
        slowdown: float = 1.0,
        *,
        single_thread: bool = True,
        quota_cpus: float | None = None,
        period_s: float = 0.0,
    ) -> None:
        self._pace = Pace(slowdown, single_thread=single_thread, device=torch.device(device))
        self._clock = time.thread_time if single_thread else time.process_time
        self.on_cpu = self._pace.on_cpu
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self._quota_cpus = quota_cpus
        self._single_thread = single_thread
        self._used = self._clock if quota_cpus is None else time.process_time
        """What the stretch is made of: under a quota this process's other threads run at its cost, too."""
        self._since: tuple[float, float] | None = None
        self.by_wall = False
        """Set where ``layers_wait``: a second of the CPU then says little."""
        self._waited_s = 0.0
        told_apart = single_thread and self.on_cpu and slowdown == 1.0
        self.stretches = Stretches(period_s) if told_apart else None

    def run(self, part: Callable[[], None]) -> tuple[float, float]:
        """Runs one part. Returns (wall, CPU) seconds, the emulated slowdown in the wall time."""
        before = scheduled() if self.stretches is not None else None
        timed = self._pace.run(part)
        after = scheduled() if before is not None else None
        if before is not None and after is not None:
            self._waited_s += max(0.0, timed.wall_s - timed.cpu_s - (after[1] - before[1]))
        return timed.wall_s, timed.cpu_s

    @property
    def by_cpu(self) -> bool:
        """Whether repetitions are judged by the CPU's clock."""
        return self.on_cpu and not self.by_wall

    @property
    def layers_wait(self) -> bool:
        """Whether the repetitions themselves wait for other things than a processor (a sleep, a disk)."""
        return self._waited_s > WAITS * (self._waited_s + self.cpu_s)

    def sample(self, steps: Steps) -> Sample:
        """One repetition."""
        begun = self._since or (time.perf_counter(), self._used())
        steps.prepare()
        first = self.run(steps.forward)
        steps.between()
        second = self.run(steps.backward)
        self._since = time.perf_counter(), self._used()
        if self._pace.slowdown == 1.0:
            self.wall_s += self._since[0] - begun[0]
            self.cpu_s += self._since[1] - begun[1]
            if self.stretches is not None:
                self.stretches.add(self._since[0] - begun[0], self._since[1] - begun[1])
        else:
            self.wall_s += first[0] + second[0]
            self.cpu_s += first[1] + second[1]
        return Sample(*first, *second)

    def stretch(self) -> float | None:
        """Wall seconds per CPU second over what was measured, or None where layers may differ in it.

        With one thread all work is stretched alike. With several, only a quota that bites makes it so: the
        process then gets the quota's CPU time whatever it runs. In the long run nobody gets more than the
        quota: what a saved-up burst allowed for a while is not counted.
        """
        quota = self._quota_cpus
        if not self.by_cpu or self.cpu_s <= 0 or self.wall_s <= 0:
            return None
        if not self._single_thread and (quota is None or self.cpu_s / self.wall_s < BITES * quota):
            return None
        found = self.wall_s / self.cpu_s
        if self.stretches is not None:
            found = self.stretches.stretch() or found
        return found if quota is None else max(found, 1.0 / quota)

    def stretch_interval(self) -> float:
        """Half of the stretch's 95% interval, relative to it; 0 where it is not used or not known."""
        if self.stretches is None or self.stretch() is None:
            return 0.0
        return self.stretches.interval()


def collect(
    meter: Meter,
    steps: Steps,
    *,
    slice_s: float,
    warm_up_s: float = 0.0,
    warm_up_repeats: int = 1,
    minimum_s: float = 0.0,
    over: Callable[[], bool] = lambda: False,
) -> list[Sample]:
    """Warm-up, then repetitions until the estimate is steady or the slice is over.

    Args:
        slice_s: wall seconds after which to stop; at least ``MIN_REPEATS`` are done all the same.
        warm_up_s: at least so long and so often is run before what counts.
        minimum_s: not to stop before this much, however steady.
        over: from when on one repetition that counts is enough.
    """
    start = time.perf_counter()
    done = 0
    while done < warm_up_repeats or time.perf_counter() - start < warm_up_s:
        meter.sample(steps)
        done += 1
        if over():
            break
    samples: list[Sample] = []
    start = time.perf_counter()
    while len(samples) < MAX_SAMPLES:
        samples.append(meter.sample(steps))
        passed_s = time.perf_counter() - start
        if over():
            break
        if len(samples) < MIN_REPEATS or passed_s < minimum_s:
            continue
        if passed_s >= slice_s or (len(samples) & 3 == 3 and steady(samples, meter.by_cpu)):
            break
    return samples


def block_sizes(samples: Sequence[Sample], cpu: bool) -> list[int]:
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


def _means(samples: Sequence[Sample], cpu: bool, sizes: Sequence[int] | None = None) -> list[float]:
    """Seconds of a repetition by block, by the CPU's clock or the wall's; ``sizes`` as for ``interval``."""
    means = []
    start = 0
    for count in block_sizes(samples, cpu) if sizes is None else sizes:
        block = samples[start : start + count]
        means.append(sum(sample.cpu_s if cpu else sample.wall_s for sample in block) / count)
        start += count
    return means


def interval(samples: Sequence[Sample], cpu: bool, sizes: Sequence[int] | None = None) -> float:
    """Half of the 95% interval (two standard errors) of the blocks' mean, relative to it; inf: not known.

    Args:
        sizes: of the blocks, where they are not the samples' own (those of the window they are a part of).
    """
    return relative_interval(_means(samples, cpu, sizes))


def relative_interval(means: Sequence[float]) -> float:
    """The same of any repeated figure."""
    if len(means) < MIN_REPEATS:
        return math.inf
    mean = statistics.fmean(means)
    return 2 * statistics.stdev(means) / math.sqrt(len(means)) / mean if mean > 0 else math.inf


def steady(samples: Sequence[Sample], cpu: bool) -> bool:
    """Whether the mean of the blocks is known within ``STEADY_INTERVAL``."""
    return interval(samples, cpu) <= STEADY_INTERVAL


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
    samples: Sequence[Sample], stretch: float | None, sizes: Sequence[int] | None = None
) -> Estimate:
    """What one repetition takes.

    Args:
        sizes: of the blocks, as for ``interval``.
        stretch: wall seconds per CPU second on this device (``Meter.stretch``), or None to go by the wall
            clock alone: then it is the mean, which holds stalls in their proportion.
    """
    cpu = stretch is not None
    means = sorted(_means(samples, cpu, sizes))
    half = relative_interval(means)
    median = statistics.median(means)
    spread = (_quantile(means, 0.9) - _quantile(means, 0.1)) / median if median > 0 else 0.0
    if stretch is not None:
        total_s = trimmed_mean(means) * stretch
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
    """Without the least and the greatest tenth, at least one each where there are five.

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
    """At each end."""
    return max(int(count * TRIMMED), int(count >= MIN_TRIMMED))


def _quantile(ordered: Sequence[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
