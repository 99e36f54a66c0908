"""A global that all layers of a list count up: they see how often all of them were called."""

import torch
from torch import nn

CALLS = []


class Counted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        CALLS.append(len(x))
        return torch.tanh(self.linear(x)) * (1 + len(CALLS) / 50)


def model():
    return [nn.Linear(8, 12), Counted(12), Counted(12), Counted(12), nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
