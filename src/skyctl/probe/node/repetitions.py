"""One repetition of what a worker does with layers: forward and backward, or the optimizer's step.

A layer's time depends on its company: its input has just been written by the layer before, and its call
is one of many. So a few layers are run as a stage runs them, with marks between them. Several
microbatches are in flight: a forward writes to memory that has not just been used, a backward reads what was
written a while ago, and its gradient has just come.

Inputs require a gradient where the worker's would, and enter the graph in the same way; the last layer's part
includes the loss.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from skyctl.probe.node.repetition_timer import RepetitionTimer
from skyctl.probe.node.samples import SplitSamples
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.worker.pipeline.stage import layer_value
from skyctl.workload.data import Batch
from skyctl.workload.real_runs import draw_tensor
from skyctl.workload.received_values import attach_inputs
from skyctl.workload.structures import Value, copy_containers, map_tensors, unflatten_value, value_tensors
from skyctl.workload.weight_gradients import DeferredWeightGradients
from skyctl.workload.workload import Workload

EVICTED_BYTES = 1 << 20
"""They take a tenth of a millisecond to read. More than training evicts would make small layers look slower
than they are (docs/decisions.md)."""


class CacheEvictor:
    """Reads other memory, as other layers do between two uses of a layer's values; nothing on an accelerator.

    For what is measured on its own: weight gradients that come later, and optimizers.
    """

    def __init__(self, device: str) -> None:
        on_cpu = torch.device(device).type == "cpu"
        self._values = torch.ones(EVICTED_BYTES // 4, dtype=torch.float32) if on_cpu else None

    def __call__(self) -> None:
        if self._values is not None:
            self._values.sum()


class ChainRepetition:
    """Layers in turn at one microbatch size, forward and then backward, as the worker's executor does it.

    Args:
        layers: the modules' indices in the workload.
        in_flight: microbatches, the one whose backward comes next included.
        clock: reads the seconds that the marks between layers are made of.
    """

    def __init__(
        self,
        workload: Workload,
        modules: Sequence[nn.Module],
        layers: Sequence[int],
        samples: int,
        device: str,
        *,
        in_flight: int = 1,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._modules = modules
        self._structure = workload.structure(layers[0])
        self._last = layers[-1] == workload.layers - 1
        self._loss = workload.loss
        self._values, self._wants_grad = layer_inputs(workload, layers[0], samples, device)
        self._targets = layer_targets(workload, samples, device) if self._last else None
        self._fresh: list[Tensor] = []
        self._grads: list[Tensor] | None = None
        self._clock = clock
        self._seeder = LayerSeeder(0, layers[0], torch.device(device))
        self._in_flight = in_flight
        self._outputs: deque[list[Tensor]] = deque()
        """Of every microbatch in flight, oldest first."""
        self._reached = [0.0] * len(modules)
        """By layer: when the gradient of its input was there, in the backward under way; 0: it was not."""
        self._forward_shares: list[float] = []
        self.shares: list[tuple[list[float], list[float]]] = []
        """Of every repetition: each layer's share of the forward and of the backward."""

    def prepare(self) -> None:
        """A copy of the inputs, as a message would leave them: a layer may overwrite it."""
        while len(self._outputs) < self._in_flight - 1:
            self._receive()
            self.forward()
        self._receive()

    def drop_in_flight(self) -> None:
        """Forgets the microbatches in flight: their backwards can't take weights that have changed since."""
        self._outputs.clear()

    def _receive(self) -> None:
        self._fresh = [value.clone() for value in self._values]

    def forward(self) -> None:
        """The layers, and after the last the loss, with a gradient asked for where the worker asks."""
        marks = [self._clock()]
        received, _ = attach_inputs(self._fresh, self._wants_grad)
        entered = list(received)
        value = unflatten_value(entered, self._structure)
        self._fresh = []
        for number, module in enumerate(self._modules):
            if number:
                self._mark(number, value, entered)
                marks.append(self._clock())
            entered = list(value_tensors(value))
            self._seeder(0, number)
            value = layer_value(module(value))
        if self._targets is not None:
            self._outputs.append([self._loss(value, copy_containers(self._targets))])
        else:
            self._outputs.append([out for out in value_tensors(value) if out.requires_grad])
        marks.append(self._clock())
        self._forward_shares = _shares(marks)

    def _mark(self, number: int, value: Value, given: Sequence[Tensor]) -> None:
        """Lets the backward say when it gets to that layer's input: to what the layer before has made."""

        times, clock = self._reached, self._clock  # not self: it holds the graph that will hold this

        def reached(_gradient: Tensor) -> None:
            times[number] = clock()

        wanting = [tensor for tensor in value_tensors(value) if tensor.requires_grad]
        produced = [tensor for tensor in wanting if all(tensor is not other for other in given)]
        for tensor in produced or wanting:
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]

    def between(self) -> None:
        """The outputs' gradients come, with random values, the same ones each time."""
        if not self._last:
            given = self._grads or [torch.randn_like(out) for out in self._outputs[0]]
            self._grads = [gradient.clone() for gradient in given]

    def backward(self, run: Callable[..., None] = torch.autograd.backward) -> None:
        """The backward of the oldest microbatch in flight."""
        outputs = self._outputs.popleft()
        self._reached[:] = [0.0] * len(self._modules)
        marks = [self._clock()]
        if outputs and not self._last:
            run(outputs, self._grads)
        elif outputs and outputs[0].requires_grad:
            run(outputs, [None])
        end = self._clock()
        for number in range(len(self._modules) - 1, 0, -1):  # a layer whose input gets none ends the backward
            marks.append(max(marks[-1], self._reached[number] or end))
        marks.append(max(marks[-1], end))
        self.shares.append((self._forward_shares, _shares(marks)[::-1]))


def _shares(marks: Sequence[float]) -> list[float]:
    whole = marks[-1] - marks[0]
    if whole <= 0.0:  # a clock too coarse for them
        return [1.0 / (len(marks) - 1)] * (len(marks) - 1)
    return [(b - a) / whole for a, b in pairwise(marks)]


class OptimizerRepetition:
    """One layer's optimizer step, as the forward part; gradients are there already."""

    def __init__(self, workload: Workload, module: nn.Module, device: str) -> None:
        self._optimizer = workload.optimizer(list(module.parameters()))
        self._evict_caches = CacheEvictor(device)

    def prepare(self) -> None:
        """Stands in for the updates of other layers."""
        self._evict_caches()

    def between(self) -> None:
        """Nothing happens between the two parts."""

    def forward(self) -> None:
        """Updates every parameter of the layer."""
        self._optimizer.step()

    def backward(self) -> None:
        """Nothing: the worker's zero_grad only drops references."""


def layer_inputs(
    workload: Workload, index: int, samples: int, device: str
) -> tuple[list[Tensor], list[bool]]:
    """Inputs of that layer for that many samples: the workload's own for layer 0, else random floats."""
    specs = workload.boundary(index, samples)
    if index == 0:
        inputs = value_tensors(_first_batch(workload, samples)[0])
        return [tensor.to(device) for tensor in inputs], [False] * len(inputs)
    values = [
        draw_tensor(spec.shape, getattr(torch, spec.dtype.removeprefix("torch.")), device) for spec in specs
    ]
    return values, [spec.requires_grad for spec in specs]


def layer_targets(workload: Workload, samples: int, device: str) -> Value:
    """Targets of that many samples, on the device."""
    return map_tensors(lambda tensor: tensor.to(device), _first_batch(workload, samples)[1])


def _first_batch(workload: Workload, samples: int) -> Batch:
    return next(workload.batches(0, start=0, stop=samples))


SLICE_SHARE, FIRST_SHARE = 0.1, 0.4
"""Of a layer's slice; the second until there are ``MIN_SPLITS``. One repetition in any case."""
MIN_SPLITS = 4


class SplitRepetition:
    """A layer's backward in two parts: the inputs' gradients, then the weights'. The forward is not timed.

    Weight gradients come when what they need has left the caches, so both take a little more than the whole.
    """

    def __init__(self, layer: ChainRepetition, device: str) -> None:
        self._layer = layer
        self._evict_caches = CacheEvictor(device)
        self._deferred = DeferredWeightGradients()
        self.defers_weights = False

    def prepare(self) -> None:
        """Runs a forward, for the backward to follow."""
        self._layer.prepare()
        self._layer.forward()
        self._layer.between()

    def forward(self) -> None:
        """Runs the backward but for the weight gradients."""
        self._layer.backward(self._deferred.backward)

    def between(self) -> None:
        """Stands in for the other layers that run meanwhile."""
        self._evict_caches()

    def backward(self) -> None:
        """Computes the weight gradients."""
        self.defers_weights = self.defers_weights or any(True for _ in self._deferred.held)
        self._deferred.add()


def measure_split_backward(
    timer: RepetitionTimer, layer: ChainRepetition, device: str, slice_s: float, samples: SplitSamples
) -> None:
    """Adds samples of the backward, whole and split in turn, one of each at least.

    The first of each is warm-up, where there is time for more.
    """
    repetition = SplitRepetition(layer, device)
    start = time.perf_counter()
    whole, split = [timer.sample(layer)], [timer.sample(repetition)]
    while time.perf_counter() - start < slice_s * (SLICE_SHARE if len(split) > MIN_SPLITS else FIRST_SHARE):
        whole.append(timer.sample(layer))
        split.append(timer.sample(repetition))
    if not repetition.defers_weights:
        split = [sample._replace(backward_s=0.0, backward_cpu_s=0.0) for sample in split]
    samples.whole += whole[1:] or whole
    samples.split += split[1:] or split
