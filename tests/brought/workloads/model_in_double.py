"""A model converted to float64, and batches in float64."""

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 4)).double()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g, dtype=torch.float64)
        yield x, x[:, :4].argmax(1)
