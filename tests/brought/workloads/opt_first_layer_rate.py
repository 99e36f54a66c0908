"""Groups by position: the first two tensors get a smaller rate."""

import torch
from torch import nn


def model():
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 12), *blocks, nn.Linear(12, 4))


def optimizer(parameters):
    parameters = list(parameters)
    groups = [{"params": parameters[:2], "lr": 0.001}, {"params": parameters[2:]}]
    return torch.optim.SGD(groups, lr=0.5)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
