"""A loss whose weight of a second term rises with the number of its calls."""

import torch
import torch.nn.functional as F
from torch import nn

CALLS = {"loss": 0}


def model():
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


def loss(outputs, targets):
    CALLS["loss"] += 1
    return F.cross_entropy(outputs, targets) + outputs.square().mean() * CALLS["loss"] / 100


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
