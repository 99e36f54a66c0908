"""A counter in a dict in self, within the layers of a list."""

import torch
from torch import nn


class Annealed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.state = {"calls": 0}

    def forward(self, x):
        if self.training:
            self.state["calls"] += 1
        return x + torch.tanh(self.linear(x)) * min(1.0, self.state["calls"] / 20)


def model():
    return [nn.Linear(8, 12), Annealed(12), Annealed(12), nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
