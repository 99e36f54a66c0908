"""An optimizer over a global model's parameters, not over those that it is given."""

import torch
from torch import nn

NET = None


def model():
    global NET
    NET = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    return NET


def optimizer(parameters):
    return torch.optim.SGD(NET.parameters(), lr=0.2, momentum=0.9)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
