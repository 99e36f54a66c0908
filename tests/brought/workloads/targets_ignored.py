"""Some targets are -100, which cross-entropy leaves out."""

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 4))


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=g)
        y = x[:, :4].argmax(1)
        y[1::4] = -100
        yield x, y
