"""A layer that leaves torch for NumPy for a part without gradients."""

import numpy as np
import torch
from torch import nn


class Ranked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        order = np.argsort(x.detach().cpu().numpy(), axis=1).copy()
        return torch.tanh(self.linear(x)).gather(1, torch.from_numpy(order))


def model():
    return [nn.Linear(8, 12), Ranked(12), Ranked(12), nn.Linear(12, 4)]


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        yield x, x[:, :4].argmax(1)
