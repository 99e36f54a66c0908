"""A scale read by item() from a parameter, within a layer of a list."""

import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        largest = self.linear.weight.abs().max().item()
        return torch.tanh(self.linear(x) / max(largest, 0.1))


def model():
    return [nn.Linear(8, 12), Scaled(12), Scaled(12), nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
