"""Random numbers in layers (dropout), alike under every plan.

Before a layer's forward the generators start from (seed, step, microbatch, layer). What a layer draws then
depends on nothing that a plan decides: not on which layers run before it in the same process, nor on the
order of microbatches. Seeding costs about 10 µs a layer and microbatch (CPU), so it is done for every layer,
and no layer has to be known as one that draws.
"""

from __future__ import annotations

import random

import torch

_MASK = 2**64 - 1


class Randomness:
    """Seeds torch's generators, of the CPU and of the stage's device, and Python's ``random``.

    Generators that the user's layers make themselves are theirs to seed.

    Args:
        start: the index of the stage's first layer.
    """

    def __init__(self, seed: int, start: int, device: torch.device) -> None:
        self._seed, self._start = seed, start
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self.step = 0

    def __call__(self, microbatch: int, position: int) -> None:
        """Before the layer at that position of the stage runs, forward or again in a recomputation."""
        seed = mixed(self._seed, self.step, microbatch, self._start + position)
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)


def mixed(*values: int) -> int:
    """32 well mixed bits of some whole numbers (torch's CPU generator uses no more); splitmix64's steps."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 32
