"""Random numbers in layers (dropout), alike under every plan.

Before a layer's forward the generators start from (seed, step, microbatch, layer). What a layer draws then
depends on nothing that a plan decides: not on which layers run before it in the same process, nor on the
order of microbatches. Seeding costs about 10 µs a layer and microbatch (CPU), so it is done for every layer,
and no layer has to be known as one that draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

_MASK = 2**64 - 1
_SPREAD = 0x9E3779B97F4A7C15


class Randomness:
    """Seeds torch's generators, of the CPU and of the stage's device, and Python's ``random``.

    Generators that the user's layers make themselves are theirs to seed.

    Args:
        start: the index of the stage's first layer.
    """

    def __init__(self, seed: int, start: int, device: torch.device) -> None:
        self._seed, self._start = seed, start
        self._seeders: list[Callable[[int], object]] = [torch.default_generator.manual_seed, random.seed]
        if device.type == "cuda":
            self._seeders.append(torch.cuda.default_generators[device.index or 0].manual_seed)
        elif device.type in ("mps", "xpu"):
            self._seeders.append(getattr(torch, device.type).manual_seed)
        self.step = 0

    def __call__(self, microbatch: int, position: int) -> None:
        """Before the layer at that position of the stage runs, forward or again in a recomputation."""
        seed = mixed(self._seed, self.step, microbatch, self._start + position)
        for seeder in self._seeders:
            seeder(seed)


def mixed(*values: int) -> int:
    """32 well mixed bits of some whole numbers (more the CPU generator does not use): splitmix64's end."""
    state = 0
    for value in values:
        state = (state + value) * _SPREAD & _MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state >> 32
