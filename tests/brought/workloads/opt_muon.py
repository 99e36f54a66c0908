"""torch's Muon, on a model that has matrices alone."""

import torch
from torch import nn


def model():
    blocks = [nn.Sequential(nn.Linear(12, 12, bias=False), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 12, bias=False), *blocks, nn.Linear(12, 4, bias=False))


def optimizer(parameters):
    return torch.optim.Muon(parameters, lr=0.05, momentum=0.9)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
