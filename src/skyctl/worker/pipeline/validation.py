"""Validation: mean loss and metrics over held-out batches, forwards only, through the pipeline that trains.

The messages are those of a step's forward direction, under step numbers of their own. The last batch is
announced along the pipeline, so that stages without data need not know how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.errors import RunError
from skyctl.worker.batches.sample_batches import split_inputs, split_targets
from skyctl.worker.pipeline.executor import Executor
from skyctl.worker.pipeline.layer_seeder import LayerSeeder
from skyctl.worker.pipeline.messages import LAST_STEP
from skyctl.worker.pipeline.stage import layer_value
from skyctl.workload.data import Batch
from skyctl.workload.recipe import Recipe
from skyctl.workload.structures import Value, map_tensors
from skyctl.workload.validation_metrics import MetricMeans
from skyctl.workload.workload import Workload


@dataclass(frozen=True)
class ValidationResult:
    """The mean loss over the samples of a validation, and the means of the user's metrics.

    ``metrics``: by name, None where the mean is no number; None: the workload has no ``metrics``.
    ``samples``: how many they are.
    """

    loss: float
    metrics: Mapping[str, float | None] | None = None
    samples: int = 0


class Validator:
    """One stage's part in the validations of a run.

    Args:
        batches: gives held-out batches, the same ones each time; called on the first and the last stage only.
        batch_count: how many of them make a validation.
        loss_fn: on the last stage, the mean over a microbatch's samples.
        metrics_fn: on the last stage, further means over a microbatch's samples, by name.
        seeder: called before each layer, as in training.
        microbatch_sizes: samples of each microbatch of a whole batch.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        batches: Callable[[], Iterator[Batch]],
        batch_count: int,
        loss_fn: Callable[[Any, Any], Tensor],
        metrics_fn: Callable[[Any, Any], Mapping[str, float]],
        seeder: LayerSeeder,
        microbatch_sizes: Sequence[int],
    ) -> None:
        self._sizes = microbatch_sizes
        self._executor, self._layers = executor, executor.stage.layers
        self._inputs, self._outputs = executor.stage_io.inputs, executor.stage_io.outputs
        self._batches, self._batch_count = batches, batch_count
        self._loss_fn, self._metrics_fn, self._seeder = loss_fn, metrics_fn, seeder

    def run(self, step: int) -> ValidationResult | None:
        """Validates after that step; returns what was found on the last stage, None elsewhere.

        Layers are in ``eval()`` meanwhile, and afterwards each module is as it was.

        Raises:
            RunError: the ends of the pipeline were given different numbers of batches.
            WorkloadError: the user's loss or metrics failed.
        """
        has_data = self._inputs is None or self._outputs is None
        batches = _with_last_flag(islice(self._batches(), self._batch_count)) if has_data else None
        total, done, last = 0.0, 0, False
        means = MetricMeans()
        with eval_mode(self._layers), torch.no_grad():
            while not last:
                batch: Any = None
                if batches is not None:
                    batch, last = next(batches)
                # a number that no step has, and no other validation
                mark = -1 - (step * self._batch_count + done)
                loss, announced = self._run_batch(mark, step, batch, last, means)
                if batches is not None and self._inputs is not None and announced != last:
                    raise RunError(
                        "the first and the last stage were given different numbers of held-out batches",
                        hint="validation(batch_size, seed) must give the same batches on every node",
                    )
                last = announced
                total += loss
                done += 1
        if self._outputs is not None:
            self._outputs.drain()
            return None
        return ValidationResult(total / done, means.means(), done * sum(self._sizes))

    def _run_batch(
        self, mark: int, step: int, batch: Any, last: bool, means: MetricMeans
    ) -> tuple[float, bool]:
        """One batch through this stage → (its mean loss on the last stage, whether it is the last batch).

        The last stage adds its metrics to ``means``.
        """
        executor, sizes = self._executor, self._sizes
        inputs = split_inputs(batch[0], sizes, executor.device) if self._inputs is None else None
        targets = split_targets(batch[1], sizes, executor.device) if self._outputs is None else None
        if self._inputs is not None:
            self._inputs.begin(mark, len(sizes))
        self._seeder.step = mark
        total = 0.0
        for microbatch, size in enumerate(sizes):
            executor.progress.phase = f"validation after step {step}, microbatch {microbatch}"
            if inputs is not None:
                tensors = inputs[microbatch]
            else:
                assert self._inputs is not None
                with executor.progress.waits():
                    message = self._inputs.receive(microbatch)
                tensors, last = message.tensors, bool(message.flags & LAST_STEP)
                self._inputs.refill()
            outputs = executor.timer.run(partial(self._forward, microbatch, tensors)).result
            if targets is not None:
                total += float(self._loss_fn(outputs, targets[microbatch]).item()) * size / sum(sizes)
                means.add(self._metrics_fn(outputs, targets[microbatch]), size)
            else:
                assert self._outputs is not None
                self._outputs.confirm(microbatch - executor.in_flight)  # else sends would pile up
                tensors = executor.stage.output_tensors(outputs)
                self._outputs.send(mark, microbatch, tensors, LAST_STEP if last else 0)
        if self._outputs is not None:
            self._outputs.drain()
        return total, last

    def _forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> Value:
        value = self._executor.stage.input_value(inputs)
        for position, layer in enumerate(self._layers):
            self._seeder(microbatch, position)
            value = layer_value(layer(value))
        return value


@contextmanager
def eval_mode(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the layers are in ``eval()``; afterwards exactly those modules train that did before."""
    training = [module for layer in layers for module in layer.modules() if module.training]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _with_last_flag(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """(batch, whether it is the last) of each. Copies, for some sources fill the same buffers again."""
    current = _clone(next(batches, None))
    while current is not None:
        following = _clone(next(batches, None))
        yield current, following is None
        current = following


def _clone(batch: Batch | None) -> Batch | None:
    if batch is None:
        return None
    inputs, targets = (map_tensors(lambda tensor: tensor.clone(), value) for value in batch)
    return inputs, targets


def make_validator(
    recipe: Recipe,
    workload: Workload,
    executor: Executor,
    seeder: LayerSeeder,
    microbatch_sizes: Sequence[int],
) -> Validator | None:
    """The stage's validator, over the executor's own streams; None where nothing is validated.

    Args:
        microbatch_sizes: of a whole batch: one pipeline alone validates.
    """
    if recipe.validate_every is None:
        return None
    return Validator(
        executor,
        batches=workload.validation,
        batch_count=recipe.validate_batches,
        loss_fn=workload.loss,
        metrics_fn=workload.metrics,
        seeder=seeder,
        microbatch_sizes=microbatch_sizes,
    )
