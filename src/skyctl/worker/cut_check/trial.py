"""Two steps of two microbatches, and all that can be seen of them; whoever trains."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from skyctl.worker.batches.sample_batches import split_inputs, split_targets
from skyctl.workload.deferred_init import derived_seed
from skyctl.workload.structures import check_value, value_tensors
from skyctl.workload.workload import Workload

STEPS, MICROBATCHES = 2, 2


@dataclass
class Trial:
    """The results of two steps.

    Attributes:
        outputs: the model's, by step and microbatch (four in all), each its tensors.
        losses: of these microbatches, each times its share of the batch.
        gradients: by the parameter's name in the whole model's weights, of the first step.
        parameters, buffers: by name, after both steps.
        evaluated: the outputs of one more microbatch, in ``eval()``.
    """

    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluated: tuple[Tensor, ...] = ()


class OutOfTimeError(Exception):
    """There is no time for another step."""


@dataclass(frozen=True)
class Batches:
    """The same random batches for all trials of a workload.

    Args:
        samples: of a microbatch.
        until: no step is begun after that, by ``time.monotonic``.
    """

    workload: Workload
    samples: int
    device: torch.device
    until: float = math.inf

    def step(self, step: int) -> list[tuple[tuple[Tensor, ...], Any]]:
        """A step's microbatches: the tensors of the inputs, and the targets. A trial may overwrite them.

        Raises:
            OutOfTimeError: it is too late for another one.
        """
        if time.monotonic() > self.until:
            raise OutOfTimeError
        generator = torch.Generator().manual_seed(derived_seed(self.workload.spec.seed, f"cut check {step}"))
        sizes = [self.samples] * MICROBATCHES
        inputs, targets = self.workload.example.make(sum(sizes), generator)
        parts = zip(
            split_inputs(inputs, sizes, self.device), split_targets(targets, sizes, self.device), strict=True
        )
        return list(parts)

    def seed(self, step: int, microbatch: int) -> None:
        """Seeds every generator without an owner, before a microbatch's forward or an optimizer's step."""
        seed = derived_seed(self.workload.spec.seed, f"cut check {step} {microbatch}")
        torch.manual_seed(seed)
        random.seed(seed)
        numpy_random = getattr(sys.modules.get("numpy"), "random", None)
        if numpy_random is not None:
            numpy_random.seed(seed % 2**32)


def output_tensors(outputs: Any) -> tuple[Tensor, ...]:
    """Copies of the tensors in what a model gives."""
    value = check_value(outputs, "output", "model()")
    return tuple(tensor.detach().clone() for tensor in value_tensors(value))


def held_tensors(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of every parameter, buffer and plain attribute; by each name that it has.

    Args:
        modules: with the prefix of each, such as ``3.`` or nothing.
    """
    for prefix, root in modules:
        for path, module in root.named_modules(remove_duplicate=False):
            own = {**module._parameters, **module._buffers, **vars(module)}
            for name, tensor in own.items():
                if isinstance(tensor, Tensor):
                    yield f"{prefix}{path}.{name}" if path else f"{prefix}{name}", tensor
