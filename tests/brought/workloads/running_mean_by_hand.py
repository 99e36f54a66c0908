"""Inputs centred by a running mean that forward keeps in a buffer."""

import torch
from torch import nn


class Centred(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return torch.relu(self.linear(x - self.mean))


def model():
    return nn.Sequential(nn.Linear(8, 12), Centred(12), Centred(12), nn.Linear(12, 4))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
