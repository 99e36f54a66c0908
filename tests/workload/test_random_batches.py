"""Random batches, which the probe measures with, are such as the loss takes."""

import json
from dataclasses import asdict

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


def test_other_numbers_are_normal_and_whole_ones_such_as_the_example_has():
    inputs, targets = random_batch(torch.randn(8, 5), torch.tensor([3, 5] * 4))
    assert inputs.min() < -1
    assert inputs.max() > 1
    assert set(targets.tolist()) == {3, 5}


def test_few_numbers_are_drawn_as_they_were_seen():
    targets = torch.arange(64) % 10
    targets[::4] = -100  # what cross_entropy leaves out
    _, drawn = random_batch(torch.randn(64, 5), targets)
    assert set(drawn.tolist()) <= {-100, *range(10)}
    assert drawn.max() > 5
    assert F.cross_entropy(torch.randn(64, 10), drawn) > 0


def test_many_numbers_come_without_what_cannot_be():
    classes = 50_000
    seen = torch.randint(0, classes, (4096,), generator=torch.Generator().manual_seed(0))
    for sentinel in (-100, -1, classes, classes + 100, 2**31, -(2**63)):
        targets = seen.clone()
        targets[7] = sentinel
        example = BatchExample.of((torch.randn(4096, 1), targets))
        assert len(json.dumps(asdict(example))) < 4096
        sent = BatchExample.from_dict(json.loads(json.dumps(asdict(example))))
        _, drawn = next(RandomData(sent, 9999, 0).batches(0, 0, 9999))
        allowed = (drawn == sentinel) | ((drawn >= 0) & (drawn < classes))
        assert allowed.all(), sentinel
        assert len(drawn.unique()) > 5000


def test_numbers_of_every_kind_come_back():
    for tensor in (
        torch.tensor([[True], [False]]),
        torch.randint(0, 256, (2, 700_000), dtype=torch.uint8),
        torch.full((2, 1), 2**63 - 1),
        torch.tensor([[-(2**63)], [2**63 - 1]]),
        torch.randint(-(2**63), 2**63 - 1, (2, 500)),
        torch.arange(-500, 500).reshape(2, 500).to(torch.int16),
    ):
        (like,) = BatchExample.of((tensor, tensor[:, 0])).inputs
        drawn = like.make(2, torch.Generator())
        assert (drawn.dtype, drawn.shape) == (tensor.dtype, tensor.shape)
        assert tensor.min() <= drawn.min()
        assert drawn.max() <= tensor.max()
