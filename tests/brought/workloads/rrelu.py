"""Randomised leaky ReLUs between linear layers."""

import torch
from torch import nn


def model():
    return nn.Sequential(
        nn.Linear(8, 12), nn.RReLU(), nn.Linear(12, 12), nn.RReLU(0.1, 0.4), nn.Linear(12, 4)
    )


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
