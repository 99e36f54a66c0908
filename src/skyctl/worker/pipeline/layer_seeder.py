"""Seeds the random numbers that layers draw (dropout), so that they are the same under every plan.

Before a layer's forward the generators are seeded from (seed, step, microbatch, layer). A layer's draws
then depend on nothing that a plan decides: neither on which layers run before it in the same process, nor on
the order of microbatches. Seeding takes about 10 µs per layer and microbatch (CPU), so it is done for every
layer, whether it draws or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from skyctl.device.accelerator import seed_function
from skyctl.schedule.seeds import splitmix64


class LayerSeeder:
    """Seeds torch's generators, of the CPU and of the stage's device, and Python's ``random``.

    Generators that the user's layers make themselves are theirs to seed. ``step`` is set by the caller, and
    ``first_microbatch`` where that changes.

    Args:
        seed: the workload's.
        start: the index of the stage's first layer.
        first_microbatch: the number, within the step, of the first microbatch that this pipeline computes.
    """

    def __init__(self, seed: int, start: int, device: torch.device, first_microbatch: int = 0) -> None:
        self._seed, self._start, self.first_microbatch = seed, start, first_microbatch
        self._seeders: list[Callable[[int], object]] = [torch.default_generator.manual_seed, random.seed]
        if device.type != "cpu":
            self._seeders.append(seed_function(device))
        self.step = 0

    def __call__(self, microbatch: int, position: int) -> None:
        """Seeds for the layer at that position of the stage, just before it runs.

        Args:
            microbatch: counted from the pipeline's first.
        """
        number = self.first_microbatch + microbatch
        seed = splitmix64(self._seed, self.step, number, self._start + position)
        for seeder in self._seeders:
            seeder(seed)
