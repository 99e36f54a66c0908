"""The mean loss over held-out batches: forwards only, through the pipeline that trains.

The messages are those of a step's forward direction, marked with a number of their own. The last batch is
announced along the pipeline, so that stages without data need not know how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.device.pace import Pace
from skyctl.errors import RunError
from skyctl.worker.executor import Executor
from skyctl.worker.feed import as_tuple, split
from skyctl.worker.messages import LAST_STEP, Inbox, Outbox
from skyctl.worker.randomness import Randomness
from skyctl.worker.stage import as_value
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload import Workload


class Validator:
    """One stage's part.

    Args:
        inputs, outputs: the streams of the forward direction; None at the pipeline's ends.
        batches: held-out batches, the same ones each time; called by the first and the last stage only.
        number: how many of them.
        ahead: sends that may be under way before the oldest is waited for.
        loss: the mean over a microbatch's samples; of the last stage.
        pace: as in training.
        seeding: as in training, before each layer.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        takes_tuple: bool,
        inputs: Inbox | None,
        outputs: Outbox | None,
        sizes: Sequence[int],
        batches: Callable[[], Iterator[tuple[Any, Any]]],
        number: int,
        ahead: int,
        loss: Callable[[Any, Any], Tensor],
        device: torch.device,
        pace: Pace,
        seeding: Randomness,
    ) -> None:
        self._layers, self._takes_tuple = list(layers), takes_tuple
        self._inputs, self._outputs, self._sizes = inputs, outputs, sizes
        self._batches, self._number, self._ahead = batches, number, ahead
        self._loss, self._device, self._pace, self._seeding = loss, device, pace, seeding

    def run(self, step: int, player: Executor) -> float | None:
        """After that step; the loss on the last stage, None elsewhere.

        Layers are in ``eval()`` meanwhile, and afterwards each module is as it was.

        Raises:
            RunError: the ends of the pipeline were given different numbers of batches.
        """
        batches = _announced(islice(self._batches(), self._number)) if self._has_data else None
        total, done, last = 0.0, 0, False
        with evaluating(self._layers), torch.no_grad():
            while not last:
                batch: Any = None
                if batches is not None:
                    batch, last = next(batches)
                # a number that no step has, and no other validation
                mark = -1 - (step * self._number + done)
                loss, told = self._batch(mark, step, batch, last, player)
                if batches is not None and self._inputs is not None and told != last:
                    raise RunError(
                        "the first and the last stage were given different numbers of held-out batches",
                        hint="validation(batch_size, seed) must give the same batches on every node",
                    )
                last = told
                total += loss
                done += 1
        if self._outputs is not None:
            self._outputs.drain()
            return None
        return total / done

    @property
    def _has_data(self) -> bool:
        return self._inputs is None or self._outputs is None

    def _batch(self, mark: int, step: int, batch: Any, last: bool, player: Executor) -> tuple[float, bool]:
        fed = split(batch[0], self._sizes, self._device) if self._inputs is None else None
        aims = split(batch[1], self._sizes, self._device) if self._outputs is None else None
        if self._inputs is not None:
            self._inputs.begin(mark)
        self._seeding.step = mark
        total = 0.0
        for microbatch, size in enumerate(self._sizes):
            player.phase = f"validation after step {step}, microbatch {microbatch}"
            if fed is not None:
                given = as_tuple(fed[microbatch])
            else:
                assert self._inputs is not None
                player.waiting = True
                message = self._inputs.take(microbatch)
                player.waiting = False
                given, last = message.tensors, bool(message.flags & LAST_STEP)
                self._inputs.refill()
            outputs = self._pace.run(partial(self._forward, microbatch, given)).result
            if aims is not None:
                total += float(self._loss(outputs, aims[microbatch]).item()) * size / sum(self._sizes)
            else:
                assert self._outputs is not None
                self._outputs.confirm(microbatch - self._ahead)
                self._outputs.send(mark, microbatch, as_tuple(outputs), LAST_STEP if last else 0)
        if self._outputs is not None:
            self._outputs.drain()
        return total, last

    def _forward(self, microbatch: int, given: tuple[Tensor, ...]) -> Any:
        value: Any = given if self._takes_tuple else given[0]
        for position, layer in enumerate(self._layers):
            self._seeding(microbatch, position)
            value = as_value(layer(value))
        return value


@contextmanager
def evaluating(layers: Sequence[nn.Module]) -> Iterator[None]:
    """The layers in ``eval()``; afterwards every module that trained trains again, and no other."""
    training = [module for layer in layers for module in layer.modules() if module.training]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _announced(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last. Copies, for some sources fill the same buffers again."""
    current = _copied(next(batches, None))
    while current is not None:
        following = _copied(next(batches, None))
        yield current, following is None
        current = following


def _copied(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_copied(item) for item in value)
    return value.clone() if isinstance(value, Tensor) else value


def validation(
    recipe: Recipe, workload: Workload, executor: Executor, seeding: Randomness, takes_tuple: bool
) -> Validator | None:
    """The stage's part, through the executor's own streams; None where nothing is validated."""
    if recipe.validate_every is None:
        return None
    return Validator(
        executor.stage.layers,
        takes_tuple=takes_tuple,
        inputs=executor.ports.inputs,
        outputs=executor.ports.outputs,
        sizes=executor.sizes,
        batches=workload.validation,
        number=recipe.validate_batches,
        ahead=executor.in_flight,
        loss=workload.loss,
        device=executor.device,
        pace=executor.pace,
        seeding=seeding,
    )
