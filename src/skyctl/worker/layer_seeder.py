"""Seeds the random numbers that layers draw (dropout), so that they are the same under every plan.

Before a layer's forward the generators are seeded from (seed, step, microbatch, layer). What a layer draws
then depends on nothing that a plan decides: neither on which layers run before it in the same process, nor on
the order of microbatches. Seeding takes about 10 µs per layer and microbatch (CPU), so it is done for every
layer, whether it draws or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from skyctl.device.accelerator import seed_function

_MASK_64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class LayerSeeder:
    """Seeds torch's generators, of the CPU and of the stage's device, and Python's ``random``.

    Generators that the user's layers make themselves are theirs to seed. ``step`` is set by the caller.

    Args:
        seed: the workload's.
        start: the index of the stage's first layer.
        first_microbatch: the number, within the step, of the first microbatch that this pipeline computes.
    """

    def __init__(self, seed: int, start: int, device: torch.device, first_microbatch: int = 0) -> None:
        self._seed, self._start, self._first_microbatch = seed, start, first_microbatch
        self._seeders: list[Callable[[int], object]] = [torch.default_generator.manual_seed, random.seed]
        if device.type != "cpu":
            self._seeders.append(seed_function(device))
        self.step = 0

    def __call__(self, microbatch: int, position: int) -> None:
        """Seeds for the layer at that position of the stage, just before it runs.

        Args:
            microbatch: counted from the pipeline's first.
        """
        number = self._first_microbatch + microbatch
        seed = splitmix64(self._seed, self.step, number, self._start + position)
        for seeder in self._seeders:
            seeder(seed)


def splitmix64(*values: int) -> int:
    """32 bits hashed from whole numbers by splitmix64 (Steele et al. 2014); torch on CPUs uses no more."""
    state = 0
    for value in values:
        state = (state + value) * _GOLDEN_GAMMA & _MASK_64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK_64
    return state >> 32
