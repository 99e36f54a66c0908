"""The numbers that layers draw depend on seed, step, microbatch and layer, and on nothing else."""

from __future__ import annotations

import itertools
import random

import torch

from skyctl.schedule.seeds import splitmix64
from skyctl.worker.pipeline.layer_seeder import LayerSeeder

CPU = torch.device("cpu")


def drawn(randomness: LayerSeeder, microbatch: int, position: int) -> tuple[float, float]:
    randomness(microbatch, position)
    return torch.rand(()).item(), random.random()


def test_a_layer_draws_the_same_in_whichever_stage_it_is() -> None:
    whole, part = LayerSeeder(7, 0, CPU), LayerSeeder(7, 3, CPU)
    whole.step = part.step = 5
    torch.rand(17)
    first = drawn(whole, 2, 4)
    assert drawn(part, 2, 1) == first
    assert drawn(LayerSeeder(8, 0, CPU), 2, 4) != first
    whole.step = 6
    assert drawn(whole, 2, 4) != first


def test_seeds_are_spread_also_where_numbers_are_negative() -> None:
    places = list(itertools.product((0, 1, 2**40), (-3, -1, 0, 1), range(8), range(8)))
    seeds = {splitmix64(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert 0.4 < sum(seed < 2**31 for seed in seeds) / len(seeds) < 0.6
