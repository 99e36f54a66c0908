"""What a layer's backward takes cut in two, and which part its weight gradients are, run as the worker does.

They come later, when what they need has left the caches: both together take a little more than the whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

from skyctl.probe.node.cache import Elsewhere
from skyctl.probe.node.clock import Meter, Sample
from skyctl.probe.node.steps import ChainSteps
from skyctl.workload.weightgrad import WeightGradients

SLICE_SHARE, FIRST_SHARE = 0.1, 0.4
"""Of a layer's slice; the second until there are ``PAIRS``. One repetition in any case."""
PAIRS = 4


class SplitSteps:
    """The backward in two parts: the inputs' gradients, then the weights'. The forward is not timed."""

    def __init__(self, layer: ChainSteps, device: str) -> None:
        self._layer = layer
        self._elsewhere = Elsewhere(device)
        self._later = WeightGradients()
        self.puts_off = False

    def prepare(self) -> None:
        """A forward."""
        self._layer.prepare()
        self._layer.forward()
        self._layer.between()

    def forward(self) -> None:
        """The first part."""
        self._layer.backward(self._later.backward)

    def between(self) -> None:
        """Other layers run."""
        self._elsewhere()

    def backward(self) -> None:
        """The second part."""
        self.puts_off = self.puts_off or any(True for _ in self._later.held)
        self._later.add()


@dataclass
class Backwards:
    """Repetitions of one layer's backward: whole, and cut in two (as forward and backward of a sample)."""

    whole: list[Sample] = field(default_factory=list)
    cut: list[Sample] = field(default_factory=list)

    def ratio(self, on_cpu: bool) -> float:
        """What both parts take, of the whole: medians, for these are few."""
        whole = median(s.backward_cpu_s if on_cpu else s.backward_s for s in self.whole)
        return median(s.cpu_s if on_cpu else s.wall_s for s in self.cut) / whole if whole > 0 else 1.0

    def share(self, on_cpu: bool) -> float:
        """The second part's, of both."""
        first = median(s.forward_cpu_s if on_cpu else s.forward_s for s in self.cut)
        second = median(s.backward_cpu_s if on_cpu else s.backward_s for s in self.cut)
        return second / (first + second) if first + second > 0 else 0.0


def measure_split(meter: Meter, layer: ChainSteps, device: str, slice_s: float, found: Backwards) -> None:
    """Adds repetitions, whole and cut in turn, one of each at least; the first is warm-up, given time."""
    steps = SplitSteps(layer, device)
    start = time.perf_counter()
    whole, cut = [meter.sample(layer)], [meter.sample(steps)]
    while time.perf_counter() - start < slice_s * (SLICE_SHARE if len(cut) > PAIRS else FIRST_SHARE):
        whole.append(meter.sample(layer))
        cut.append(meter.sample(steps))
    if not steps.puts_off:
        cut = [sample._replace(backward_s=0.0, backward_cpu_s=0.0) for sample in cut]
    found.whole += whole[1:] or whole
    found.cut += cut[1:] or cut
