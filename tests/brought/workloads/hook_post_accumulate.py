"""Post-accumulate hooks on parameters: each gradient is clipped when it is there."""

import torch
from torch import nn


def clip(parameter):
    parameter.grad.clamp_(-0.002, 0.002)


def model():
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return net


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
