"""What a layer's backward takes cut in two, and which part its weight gradients are, run as the worker does.

They come later, when what they need has left the caches: both together take a little more than the whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import nn

from skyctl.probe.node.clock import Meter, Sample
from skyctl.probe.node.steps import LayerSteps
from skyctl.workload.weightgrad import WeightGradients
from skyctl.workload.workload import Workload

SLICE_SHARE = 0.1
"""Of a layer's slice; one repetition in any case."""


class SplitSteps:
    """The backward in two parts: the inputs' gradients, then the weights'. The forward is not timed."""

    def __init__(self, workload: Workload, module: nn.Module, index: int, samples: int, device: str) -> None:
        self._layer = LayerSteps(workload, module, index, samples, device)
        self._later = WeightGradients()
        self.puts_off = False

    def prepare(self) -> None:
        """A forward."""
        self._layer.prepare()
        self._layer.forward()

    def forward(self) -> None:
        """The first part."""
        self._layer.backward(self._later.backward)

    def between(self) -> None:
        """Other layers run."""
        self._layer.between()

    def backward(self) -> None:
        """The second part."""
        self.puts_off = self.puts_off or any(True for _ in self._later.held)
        self._later.add()


def split(meter: Meter, steps: SplitSteps, slice_s: float) -> list[Sample]:
    """Repetitions, first and second part in the place of forward and backward; at least one. The first is
    warm-up where there is time for more."""
    start = time.perf_counter()
    samples = [meter.sample(steps)]
    while time.perf_counter() - start < SLICE_SHARE * slice_s:
        samples.append(meter.sample(steps))
    counted = samples[1:] or samples
    if steps.puts_off:
        return counted
    return [sample._replace(backward_s=0.0, backward_cpu_s=0.0) for sample in counted]


def share(samples: Sequence[Sample], on_cpu: bool) -> float:
    """The second part's, of both."""
    second = sum(s.backward_cpu_s if on_cpu else s.backward_s for s in samples)
    both = sum(s.cpu_s if on_cpu else s.wall_s for s in samples)
    return second / both if both > 0 else 0.0
