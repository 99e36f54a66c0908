"""Full backward hooks on single layers of a sequence: gradients are clipped by value."""

import torch
from torch import nn


def clipped(module, grad_input, grad_output):
    return tuple(g if g is None else g.clamp(-0.01, 0.01) for g in grad_input)


def model():
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    net[2].register_full_backward_hook(clipped)
    net[4].register_full_backward_hook(clipped)
    return net


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
