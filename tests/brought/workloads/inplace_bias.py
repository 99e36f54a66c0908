"""Layers of a list that add their bias in place to what they are given."""

import torch
from torch import nn


class Shift(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.shift = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        x += self.shift
        return x


def model():
    layers = [nn.Linear(8, 12, bias=False), Shift(12), nn.Tanh()]
    layers += [nn.Linear(12, 12, bias=False), Shift(12), nn.Tanh()]
    return [*layers, nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
