"""Forward pre-hooks on layers of a list, one of them with keyword arguments."""

import torch
from torch import nn


def doubled(module, args, kwargs):
    return (2 * args[0],), kwargs


def model():
    layers = [nn.Linear(8, 12), nn.Sequential(nn.Linear(12, 12), nn.Tanh()), nn.Linear(12, 4)]
    layers[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    layers[2].register_forward_pre_hook(doubled, with_kwargs=True)
    return layers


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
