"""A layer that adds its own directional derivative, by torch.func.jvp."""

import torch
from torch import nn


class Jet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        value, slope = torch.func.jvp(lambda v: torch.tanh(self.linear(v)), (x,), (torch.ones_like(x),))
        return value + 0.1 * slope


def model():
    return [nn.Linear(8, 12), Jet(12), Jet(12), nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
