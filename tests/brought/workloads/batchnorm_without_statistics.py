"""Batch norms with track_running_stats=False: they have no buffers."""

import torch
from torch import nn


def model():
    blocks = []
    for _ in range(3):
        norm = nn.BatchNorm1d(12, track_running_stats=False)
        blocks.append(nn.Sequential(nn.Linear(12, 12), norm, nn.GELU()))
    return nn.Sequential(nn.Linear(8, 12), *blocks, nn.Linear(12, 4))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
