"""Hooks on parameters: one layer learns slowly, another one's bias not at all."""

import torch
from torch import nn


def model():
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    net[0].weight.register_hook(lambda grad: grad * 0.1)
    net[2].bias.register_hook(torch.zeros_like)
    return net


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
