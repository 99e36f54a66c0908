"""A parametrization of one's own: a symmetric weight."""

import torch
from torch import nn
from torch.nn.utils import parametrize


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


def model():
    net = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 4))
    parametrize.register_parametrization(net[1], "weight", Symmetric())
    parametrize.register_parametrization(net[3], "weight", Symmetric())
    return net


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
