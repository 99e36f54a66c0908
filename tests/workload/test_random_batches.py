"""Random batches, which the probe measures with, are such as the loss takes."""

import torch
from torch.nn import functional as F  # noqa: N812 - the field's name

from skyctl.workload.data import BatchExample, RandomData


def random_batch(inputs, targets):
    return next(RandomData(BatchExample.of((inputs, targets)), 64, 0).batches(0, 0, 64))


def test_probabilities_are_drawn_as_probabilities():
    pixels, clicks = torch.rand(8, 5), torch.tensor([[0.0], [1.0]] * 4)
    inputs, targets = random_batch(pixels, clicks)
    assert targets.shape == (64, 1)
    assert F.binary_cross_entropy(inputs[:, :1], targets) > 0  # refuses what is outside of [0, 1]


def test_other_numbers_are_normal_and_whole_ones_in_the_example_s_range():
    inputs, targets = random_batch(torch.randn(8, 5), torch.tensor([3, 5] * 4))
    assert inputs.min() < -1
    assert inputs.max() > 1
    assert set(targets.tolist()) == {3, 4, 5}
